"""Tiny models of many families that are made smaller in whole structures, for tests."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from tests import cases

SIZES = {
    **cases.CAUSAL,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOWS = {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 8}
MIXTURE = {"moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2}
MIXTURE |= {"shared_expert_intermediate_size": 8}
# Two blocks without experts, of which one goes: fewer lead, and the configuration counts them.
LEADING = {**SIZES, "num_hidden_layers": 5, "num_key_value_heads": 4, "moe_intermediate_size": 8}
LEADING |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
LEADING |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
JAMBA = {**SIZES, "num_hidden_layers": 6, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
JAMBA |= {"expert_layer_period": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
LAYERS = {"max_window_layers": 2, "use_sliding_window": True, "sliding_window": 8}
MORE = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, **WINDOWS)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **WINDOWS)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "numbered": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**{**SIZES, **MIXTURE, "num_hidden_layers": 5, "mlp_only_layers": [0, 3]})
    ),
    "leading": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LEADING)),
    "windows": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **LAYERS, "num_hidden_layers": 4})),
    "scaled": lambda: GPT2LMHeadModel(
        GPT2Config(**cases.CAUSAL, n_embd=16, n_layer=4, n_head=4, scale_attn_by_inverse_layer_idx=True)
    ),
    "every other": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**{**SIZES, **MIXTURE, "num_hidden_layers": 6, "decoder_sparse_step": 2})
    ),
    "told of each": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, width_of_each=[8, 4, 8])),
    "periods": lambda: JambaForCausalLM(JambaConfig(**JAMBA)),
    "turns": lambda: RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(**{**SIZES, "num_hidden_layers": 5}, lru_width=16, attention_window_size=8)
    ),
    "wide": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "intermediate_size": 100})),
    "single": lambda: MistralForCausalLM(MistralConfig(**{**SIZES, "num_key_value_heads": 1})),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    # Shared experts, router weights that do not sum to one, and a first block without experts.
    "mixture": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **MIXTURE, mlp_only_layers=[0])),
}


def build(name):
    """A model with weights and biases that are not zero."""
    if name in MORE:
        torch.manual_seed(0)
        model = MORE[name]().eval()
    else:
        model = cases.build(name)
    return perturbed(model)


def perturbed(model):
    """With gains that are not one and biases that are not zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
