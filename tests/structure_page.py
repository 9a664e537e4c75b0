"""What can go of which family: each cell is a smaller checkpoint that computes what the masked model does.

`python -m tests.structure_page` writes the table of docs/guides/smaller.md; tests/test_structure_page.py holds it to
what is seen.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.checkpoint.smaller import save_smaller
from gradprobe_hf.model.families import random_batch
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.request.compatibility import check_targets
from gradprobe_hf.run.shapes.structured import packed
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from tests import cases

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "smaller.md"
BEGIN, END = "<!-- structures -->\n", "<!-- /structures -->"
AMOUNTS = {"ffn": 7, "kv_groups": 1, "experts": 2, "blocks": 1}
TOLERANCE = 1e-4  # of the outputs in float32

SIZES: dict[str, Any] = {
    **cases.CAUSAL,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TWO_STACKS = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
TWO_STACKS |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "max_position_embeddings": 64}
BEGINS = {"vocab_size": 260, "pad_token_id": 258, "eos_token_id": 257, "decoder_start_token_id": 258}
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 3, "num_heads": 4, **BEGINS}
OPT = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
OPT |= {"ffn_dim": 24, "word_embed_proj_dim": 16}
MASKED = SIZES | {"pad_token_id": 1}
MIXTURE = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
DEEPSEEK = MIXTURE | {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
DEEPSEEK |= {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
GEMMA4 = {"sliding_window": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 260}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4_MIXTURE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 8}
FALCON = {name: size for name, size in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
FALCON |= {"ffn_hidden_size": 24, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}
GPT_NEO = {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, "window_size": 8}
# Two thirds of its width, rounded up to a multiple of four, are 24.
LFM2 = {"intermediate_size": 33, "block_multiple_of": 4, "layer_types": ["conv", "full_attention"] * 2}
DISTILBERT = {"vocab_size": 260, "pad_token_id": 1, "dim": 16, "hidden_dim": 24, "n_heads": 4, "n_layers": 4}


@dataclass(frozen=True)
class Family:
    """A family, and a tiny model of it.

    Attributes:
        kind: its model type, as transformers calls it.
        auto: that makes the model.
        sizes: of the configuration.
    """

    name: str
    kind: str
    auto: Any
    sizes: dict[str, Any]

    def make(self) -> PreTrainedModel:
        """A model with gains that are not one, and biases that are not zero, buffers of routers among them."""
        torch.manual_seed(0)
        model = self.auto.from_config(AutoConfig.for_model(self.kind, **self.sizes)).eval()
        with torch.no_grad():
            for tensor in (*model.parameters(), *_corrections(model)):
                tensor.add_(0.1 * torch.randn_like(tensor))
        return model


def _corrections(model: PreTrainedModel) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def _decoder(name: str, kind: str, **sizes: Any) -> Family:
    return Family(name, kind, AutoModelForCausalLM, SIZES | sizes)


WIDE = {"head_dim": 8}  # heads that together are not as wide as the hidden states
FAMILIES = (
    _decoder("Llama", "llama", **WIDE),
    _decoder("Mistral", "mistral", **WIDE, sliding_window=8),
    _decoder("Ministral", "ministral", **WIDE),
    _decoder("Ministral 3", "ministral3", **WIDE),
    _decoder("Qwen2", "qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2),
    _decoder("Qwen3", "qwen3", **WIDE, tie_word_embeddings=True),
    _decoder("Qwen3.5", "qwen3_5_text", **WIDE),
    _decoder("Gemma", "gemma", **WIDE),
    _decoder("Gemma 2", "gemma2", **WIDE, query_pre_attn_scalar=4, sliding_window=8),
    _decoder("Gemma 3", "gemma3_text", **WIDE, query_pre_attn_scalar=4, sliding_window=8),
    _decoder("Gemma 4", "gemma4_text", **WIDE, **GEMMA4),
    _decoder("Gemma 4 MoE", "gemma4_text", **WIDE, **GEMMA4, **GEMMA4_MIXTURE),
    _decoder("VaultGemma", "vaultgemma", **WIDE),
    _decoder("Phi", "phi"),
    _decoder("Phi-3", "phi3"),
    _decoder("OLMo", "olmo"),
    _decoder("OLMo 2", "olmo2"),
    _decoder("OLMo 3", "olmo3", sliding_window=8),
    _decoder("SmolLM3", "smollm3", **WIDE),
    _decoder("Granite", "granite", **WIDE),
    _decoder("StarCoder2", "starcoder2", **WIDE),
    _decoder("Cohere 2", "cohere2", **WIDE),
    _decoder("GLM-4", "glm4", **WIDE),
    _decoder("EXAONE 4", "exaone4", **WIDE),
    _decoder("Nemotron", "nemotron", **WIDE),
    _decoder("Seed-OSS", "seed_oss", **WIDE),
    _decoder("Apertus", "apertus", **WIDE),
    _decoder("Arcee", "arcee", **WIDE),
    _decoder("ERNIE 4.5", "ernie4_5", **WIDE),
    _decoder("Helium", "helium", head_dim=4),
    _decoder("LFM2", "lfm2", **LFM2),
    _decoder("Falcon-H1", "falcon_h1"),
    Family("Falcon", "falcon", AutoModelForCausalLM, FALCON),
    _decoder("MPT", "mpt"),
    _decoder("Hunyuan", "hunyuan_v1_dense", **WIDE),
    _decoder("Mixtral", "mixtral", **WIDE, num_local_experts=6),
    _decoder("Qwen2-MoE", "qwen2_moe", **MIXTURE, num_experts=6, shared_expert_intermediate_size=8),
    _decoder("Qwen3-MoE", "qwen3_moe", **WIDE, **MIXTURE, num_experts=6, norm_topk_prob=True),
    _decoder("Qwen3.5-MoE", "qwen3_5_moe_text", **WIDE, **MIXTURE, num_experts=6),
    _decoder("Qwen3-Next", "qwen3_next", **WIDE, **MIXTURE, num_experts=6),
    _decoder("OLMoE", "olmoe", num_experts=6, num_experts_per_tok=2),
    _decoder("PhiMoE", "phimoe", num_local_experts=6),
    _decoder("GraniteMoE", "granitemoe", num_local_experts=6),
    _decoder("GPT-OSS", "gpt_oss", **WIDE, num_local_experts=6, num_experts_per_tok=2, sliding_window=8),
    _decoder("GLM-4 MoE", "glm4_moe", **WIDE, **DEEPSEEK),
    _decoder("DeepSeek-V2", "deepseek_v2", **DEEPSEEK),
    _decoder("DeepSeek-V3", "deepseek_v3", **DEEPSEEK),
    _decoder("ERNIE 4.5 MoE", "ernie4_5_moe", moe_num_experts=6, moe_intermediate_size=8, moe_k=2),
    _decoder("MiniMax", "minimax", **WIDE, num_local_experts=6),
    _decoder("MiniMax-M2", "minimax_m2", **WIDE, num_local_experts=6, num_experts_per_tok=2),
    _decoder("AFMoE", "afmoe", **WIDE, **MIXTURE, num_experts=6, num_dense_layers=1, sliding_window=8),
    _decoder("Hunyuan MoE", "hunyuan_v1_moe", **WIDE, num_experts=6, moe_topk=2),
    _decoder("StableLM", "stablelm"),
    _decoder("GPT-2", "gpt2"),
    _decoder("GPT-J", "gptj", rotary_dim=4),
    _decoder("CodeGen", "codegen", rotary_dim=4),
    _decoder("GPT-Neo", "gpt_neo", **GPT_NEO),
    _decoder("GPT-NeoX", "gpt_neox"),
    Family("OPT", "opt", AutoModelForCausalLM, OPT),
    _decoder("BLOOM", "bloom"),
    Family("BERT", "bert", AutoModelForMaskedLM, MASKED),
    Family("RoBERTa", "roberta", AutoModelForMaskedLM, MASKED),
    Family("DistilBERT", "distilbert", AutoModelForMaskedLM, DISTILBERT),
    Family("ModernBERT", "modernbert", AutoModelForMaskedLM, MASKED | {"cls_token_id": 256, "sep_token_id": 257}),
    Family("ViT", "vit", AutoModelForImageClassification, SIZES | {"image_size": 8, "patch_size": 4}),
    Family("T5", "t5", AutoModelForSeq2SeqLM, T5),
    Family("T5 1.1", "t5", AutoModelForSeq2SeqLM, T5 | {"feed_forward_proj": "gated-gelu"}),
    Family("BART", "bart", AutoModelForSeq2SeqLM, TWO_STACKS | BEGINS),
)


def outputs(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batch)[0]
        return found


def cell(family: Family, structure: str) -> str:
    """ "yes" where the smaller checkpoint computes what the masked model does, "-" where that is refused.

    Raises:
        AssertionError: it was not refused, and something is wrong with it.
    """
    model, amounts = family.make(), {structure: AMOUNTS[structure]}
    targets = find_targets(model)
    if (refusal := _refusal(model, GradProbeConfig(structure=amounts, update="none"))) is not None:
        assert re.search(r"eave '\w+' out|without structure|channels alone", refusal), refusal
        return "-"
    removal = Removal.example(Plan.of(model, targets, amounts))
    biases, masks = silenced(model, removal.blocks), packed(removal, targets)
    batch = random_batch(model, 2, 12)
    with tempfile.TemporaryDirectory() as folder:
        with applied(model, targets, masks, keep=False, new_weights=biases, routes=removal.routes):
            save_smaller(Path(folder), model, removal)
            wanted = outputs(model, batch)
        # By transformers alone, as a user would: nothing missing, nothing left over, no shape that does not fit.
        loaded, info = family.auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(outputs(loaded, batch), wanted, rtol=0, atol=TOLERANCE)
    assert not torch.allclose(outputs(model, batch), wanted, rtol=0, atol=TOLERANCE), "something went"
    assert loaded.num_parameters() == removal.parameters(model) < model.num_parameters()
    return "yes"


def _refusal(model: PreTrainedModel, config: GradProbeConfig) -> str | None:
    try:
        check_targets(model, find_targets(model), config)
    except ValueError as error:
        return str(error)
    return None


def line(family: Family, see: Callable[[Family, str], str] = cell) -> str:
    """A row of the table."""
    cells = [see(family, structure) for structure in AMOUNTS]
    return "| " + " | ".join([family.name, f"`{type(family.make()).__name__}`", *cells]) + " |"


def main() -> None:
    header = f"| family | class | {' | '.join(f'`{name}`' for name in AMOUNTS)} |\n|---|---|{'---|' * len(AMOUNTS)}\n"
    text, rows = PAGE.read_text(encoding="utf-8"), ""
    for family in FAMILIES:
        rows += f"{line(family)}\n"
        print(rows.splitlines()[-1])
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{header}{rows}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
