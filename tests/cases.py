"""Tiny real models made from their own configurations, a byte tokenizer to go with them, and short ways to use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from gradprobe_hf import GradProbeConfig, PruneResult, prune_pretrained
from gradprobe_hf.config.presets import METHOD
from gradprobe_hf.probe.engine import Workload

VOCABULARY = 260
SPECIAL = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
CAUSAL = {"vocab_size": VOCABULARY, **SPECIAL}


def llama(tie: bool = False) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        **CAUSAL,
    )
    return LlamaForCausalLM(config)


def gpt2() -> PreTrainedModel:
    # dropout on, as in the real one: the probe must switch it off
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=64, **CAUSAL))


def opt() -> PreTrainedModel:
    config = OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        **CAUSAL,
    )
    return OPTForCausalLM(config)


def gpt_neox() -> PreTrainedModel:
    config = GPTNeoXConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **CAUSAL,
    )
    return GPTNeoXForCausalLM(config)


def mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        **CAUSAL,
    )
    return MixtralForCausalLM(config)


def bert() -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return BertForMaskedLM(config)


def t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_ff=24,
        d_kv=4,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=258,
        pad_token_id=258,
        eos_token_id=257,
    )
    return T5ForConditionalGeneration(config)


def vit() -> PreTrainedModel:
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return ViTForImageClassification(config)


@dataclass(frozen=True)
class Case:
    """A model and how many weights of it are targets by default."""

    make: Callable[[], PreTrainedModel]
    targets: int
    modality: str = "causal"


LLAMA_BLOCK = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24
GPT_BLOCK = 4 * 16 * 16 + 2 * 16 * 24

CASES = {
    "llama": Case(llama, 3 * LLAMA_BLOCK),
    "tied": Case(lambda: llama(tie=True), 3 * LLAMA_BLOCK),
    "gpt2": Case(gpt2, 2 * (4 * 16 * 16 + 2 * 16 * 64)),
    "opt": Case(opt, 2 * GPT_BLOCK),
    "gpt_neox": Case(gpt_neox, 2 * GPT_BLOCK),
    "mixtral": Case(mixtral, 2 * (2 * 16 * 16 + 2 * 8 * 16 + 4 * 3 * 16 * 24)),
    "bert": Case(bert, 2 * GPT_BLOCK, "masked"),
    "t5": Case(t5, 2 * (4 * 16 * 16 + 2 * 16 * 24) + 2 * (8 * 16 * 16 + 2 * 16 * 24), "seq2seq"),
    "vit": Case(vit, 2 * GPT_BLOCK, "image"),
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model whose weights are large enough that gradients differ from matrix to matrix."""
    torch.manual_seed(seed)
    model = CASES[name].make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model.to(dtype).eval()


def batches(name: str, rows: int = 6, length: int = 12, batch_size: int = 2, seed: int = 1) -> list[dict]:
    """The same rows whatever the batch size, so that batchings compare."""
    generator = torch.Generator().manual_seed(seed)
    modality = CASES[name].modality
    if modality == "image":
        pixels = torch.randn(rows, 3, 8, 8, generator=generator)
        labels = torch.randint(3, (rows,), generator=generator)
        whole = {"pixel_values": pixels, "labels": labels}
    else:
        ids = torch.randint(256, (rows, length), generator=generator)
        whole = {"input_ids": ids}
        if modality != "causal":
            whole["labels"] = torch.randint(256, (rows, length - 3 * (modality == "seq2seq")), generator=generator)
    parts = {key: value.split(batch_size) for key, value in whole.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def tokenizer(template: str = "$A") -> PreTrainedTokenizerFast:
    """One token per byte: no download, and text of any kind has a known length.

    Args:
        template: what it makes of a text, `"<s> $A </s>"` say.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary |= {"<s>": 256, "</s>": 257, "<pad>": 258, "<unk>": 259}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [(name, backend.token_to_id(name)) for name in template.split() if name != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def workload(model: PreTrainedModel, batches: Sequence[dict], **options: Any) -> Workload:
    """Passes over these batches, without a progress bar."""
    return Workload(model, batches, progress=False, **options)


def config(**options: Any) -> GradProbeConfig:
    """Options of most tests: two probes where no method is given, so that the masks are all that changes."""
    plain = {} if {"preset", "pattern", "structure", *METHOD} & set(options) else {"probes": 2}
    return GradProbeConfig(**plain, **options)


def prune(
    model: PreTrainedModel, calibration: Any, *, evaluation: Any = False, apply: bool = False, **options: Any
) -> PruneResult:
    """`prune_pretrained` in the terms of most tests: options of `config`, or of the call; a dry run."""
    of_call = {name: options.pop(name) for name in [*options] if name in _CALL_OPTIONS}
    return prune_pretrained(
        model,
        config(**options),
        calibration=calibration,
        evaluation=evaluation,
        apply=apply,
        progress=False,
        **of_call,
    )


_CALL_OPTIONS = (
    "loss_fn",
    "metric_fn",
    "output_dir",
    "overwrite",
    "offload_folder",
    "processing_class",
    "push_to_hub",
    "resume_dir",
)


def bits(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of every weight and buffer."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: PreTrainedModel, before: dict[str, torch.Tensor]) -> list[str]:
    """The names of those that have other bits now."""
    return [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]


def differing(masks: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> int:
    """The number of weights that one set of masks prunes and the other does not; both are of the same matrices."""
    assert list(masks) == list(others)
    return sum(int((masks[name] ^ others[name]).sum()) for name in masks)
