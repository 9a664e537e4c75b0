"""A tiny random model of every architecture, saved with its tokenizer or processor as its user would have it.

Dimensions are multiples of four, so that 2:4 is possible; depths are the least at which blocks follow on each other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = 272  # 256 bytes and some special ones
BOS, EOS, PAD, UNK, MASK, IMAGE, BEGIN_IMAGE, END_IMAGE = range(256, 264)
IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "vocab_size": TOKENS, "max_position_embeddings": 64, **IDS}
GROUPED = {**TEXT, "num_key_value_heads": 2}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
SENTENCE = "A plain sentence."
RATE = 16000  # samples of speech a second


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: as people call it.
        kind: what it works on.
        auto: the class a user loads it with.
        task: of `pipeline`.
        make: a random model.
        batch: what it is calibrated on, `[rows, ...]` with labels.
        process: its tokenizer or processor; None where that needs packages that the tests do without.
        ask: what the pipeline is called with.
        refused: the ways to prune it that are an error, before any work.
        note: for the page.
        rows: of a batch.
        offloads: whether it runs with its weights on disk, pruned or not.
    """

    name: str
    kind: str
    auto: Any
    task: str
    make: Callable[[], PreTrainedModel]
    batch: Callable[[int], dict[str, Any]]
    process: Callable[[], Any] | None
    ask: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    note: str = ""
    rows: int = 2
    offloads: bool = True

    def build(self, seed: int = 0) -> PreTrainedModel:
        """The model, with weights that are large enough for gradients to differ from matrix to matrix."""
        torch.manual_seed(seed)
        model = self.make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.2)
        return model.eval()

    def save(self, folder: Path) -> None:
        self.build().save_pretrained(folder)
        if self.process is not None:
            self.process().save_pretrained(folder)

    def batches(self, count: int = 2) -> list[dict[str, Any]]:
        torch.manual_seed(1)
        return [self.batch(self.rows) for _ in range(count)]


def byte_tokenizer(**tokens: str) -> hf.PreTrainedTokenizerFast:
    """One token a byte; `</s>` ends every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    special = ["<s>", "</s>", "<pad>", "<unk>", "<mask>", "<image>", "<begin>", "<end>"]
    vocabulary |= {symbol: BOS + index for index, symbol in enumerate(special)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=64,
        **tokens,
    )


def image(size: int = 12) -> Image.Image:
    """A picture that is no plain color."""
    values = np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(values)


def speech(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).normal(size=int(seconds * RATE)).astype(np.float32)


def ids(rows: int, length: int = 12, labels: bool = False) -> dict[str, Tensor]:
    drawn = torch.randint(256, (rows, length))
    return {"input_ids": drawn} | ({"labels": torch.randint(256, (rows, length))} if labels else {})


def classified(rows: int) -> dict[str, Tensor]:
    return {**ids(rows), "labels": torch.randint(3, (rows,))}


def pixels(rows: int, size: int = 8) -> Tensor:
    return torch.randn(rows, 3, size, size)


def described(rows: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A picture of so many tokens, and text about it, which alone is predicted."""
    text = torch.randint(256, (rows, 8))
    pictured = torch.full((rows, tokens), IMAGE)
    drawn = torch.cat([text[:, :1], pictured, text[:, 1:]], dim=1)
    return {"input_ids": drawn, "labels": drawn.masked_fill(drawn == IMAGE, -100), "pixel_values": pixels(rows), **more}


def _decoder(name: str, config: PreTrainedConfig, cls: Any, **more: Any) -> Architecture:
    return Architecture(
        name,
        more.pop("kind", "decoder"),
        hf.AutoModelForCausalLM,
        "text-generation",
        lambda: cls(config),
        ids,
        byte_tokenizer,
        {"text_inputs": SENTENCE, "max_new_tokens": 4, "do_sample": False},
        **more,
    )


def _encoder(name: str, config: PreTrainedConfig, cls: Any, **more: Any) -> Architecture:
    masked = "ForMaskedLM" in cls.__name__
    return Architecture(
        name,
        "encoder",
        hf.AutoModelForMaskedLM if masked else hf.AutoModelForSequenceClassification,
        "fill-mask" if masked else "text-classification",
        lambda: cls(config),
        (lambda rows: ids(rows, labels=True)) if masked else classified,
        byte_tokenizer,
        {"inputs": "A <mask> sentence."} if masked else {"inputs": SENTENCE},
        **more,
    )


def _translator(name: str, config: PreTrainedConfig, cls: Any) -> Architecture:
    def batch(rows: int) -> dict[str, Tensor]:
        return {**ids(rows), "labels": _uneven(torch.randint(256, (rows, 9)))}

    # transformers 5 has no pipeline for text to text: `generate` is what its users call.
    return Architecture(
        name, "encoder-decoder", hf.AutoModelForSeq2SeqLM, "", lambda: cls(config), batch, byte_tokenizer
    )


def _whisper() -> PreTrainedModel:
    config = hf.WhisperConfig(
        vocab_size=TOKENS,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=448,
        decoder_start_token_id=BOS,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **IDS,
    )
    model = hf.WhisperForConditionalGeneration(config)
    model.generation_config.no_timestamps_token_id = MASK
    return model


def _whisper_processor() -> hf.WhisperProcessor:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    special = ["<|startoftranscript|>", "<|endoftext|>", "<|pad|>", "<|unk|>", "<|notimestamps|>"]
    vocabulary |= {symbol: BOS + index for index, symbol in enumerate(special)}
    tokenizer = hf.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|pad|>")
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1, sampling_rate=RATE)
    return hf.WhisperProcessor(extractor, tokenizer)


def _transcriber(name: str, config: Any, cls: Any, **more: Any) -> Architecture:
    made = config(
        **SIZES,
        vocab_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        pad_token_id=0,
    )
    return Architecture(
        name,
        "speech",
        hf.AutoModelForCTC,
        "automatic-speech-recognition",
        lambda: cls(made),
        _spoken,
        _wav2vec2_processor,
        {"inputs": speech(0.1)},
        **more,
    )


def _wav2vec2_processor() -> hf.Wav2Vec2Processor:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # it takes a file alone
        json.dump({letter: index for index, letter in enumerate(letters)}, file)
        file.flush()
        tokenizer = hf.Wav2Vec2CTCTokenizer(file.name)
    return hf.Wav2Vec2Processor(hf.Wav2Vec2FeatureExtractor(sampling_rate=RATE), tokenizer)


def _swin() -> PreTrainedModel:
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=(2, 1), num_heads=(2, 4), window_size=4, num_labels=3
    )
    return hf.SwinForImageClassification(config)


def _segformer() -> PreTrainedModel:
    config = hf.SegformerConfig(
        depths=(1, 2),
        num_encoder_blocks=2,
        sr_ratios=(2, 1),
        hidden_sizes=(8, 16),
        patch_sizes=(7, 3),
        strides=(4, 2),
        num_attention_heads=(1, 2),
        mlp_ratios=(2, 2),
        decoder_hidden_size=16,
        num_labels=3,
    )
    return hf.SegformerForSemanticSegmentation(config)


def _clip() -> PreTrainedModel:
    config = hf.CLIPConfig(text_config=dict(TEXT), vision_config=dict(VISION), projection_dim=8)
    return hf.CLIPModel(config)


def _llava() -> PreTrainedModel:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**GROUPED),
        vision_config=hf.CLIPVisionConfig(**{**VISION, "num_hidden_layers": 3}),
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    return hf.LlavaForConditionalGeneration(config)


def _qwen() -> PreTrainedModel:
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16}
    config = hf.Qwen3_5Config(
        text_config={**GROUPED, **LINEAR},
        vision_config={**vision, **patches},
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN_IMAGE,
        vision_end_token_id=END_IMAGE,
        video_token_id=TOKENS - 1,
    )
    return hf.Qwen3_5ForConditionalGeneration(config)


def _patched(rows: int) -> dict[str, Any]:
    """Each picture is four patches, one behind the other, and one token."""
    begin, end = torch.full((rows, 1), BEGIN_IMAGE), torch.full((rows, 1), END_IMAGE)
    found = described(rows, 1)
    ids = torch.cat([begin, found["input_ids"][:, 1:2], end, found["input_ids"][:, 2:]], dim=1)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids >= IMAGE, -100),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(4 * rows, 3 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * rows),
    }


def _llava_processor() -> hf.LlavaProcessor:
    return hf.LlavaProcessor(
        _clip_images(),
        byte_tokenizer(image_token="<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _clip_images() -> Any:
    return hf.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})


def _smolvlm() -> PreTrainedModel:
    config = hf.SmolVLMConfig(
        text_config=hf.LlamaConfig(**GROUPED),
        vision_config=dict(VISION),
        scale_factor=1,
        image_token_id=IMAGE,
        pad_token_id=PAD,
    )
    return hf.SmolVLMForConditionalGeneration(config)


def _gemma3_text() -> hf.Gemma3TextConfig:
    return hf.Gemma3TextConfig(**GROUPED, head_dim=4, query_pre_attn_scalar=4, sliding_window=8)


def _gemma3() -> PreTrainedModel:
    config = hf.Gemma3Config(
        text_config=_gemma3_text(),
        vision_config=hf.SiglipVisionConfig(**VISION, vision_use_head=False),
        mm_tokens_per_image=4,
        boi_token_index=BEGIN_IMAGE,
        eoi_token_index=END_IMAGE,
        image_token_index=IMAGE,
    )
    return hf.Gemma3ForConditionalGeneration(config)


def _gemma3_processor() -> hf.Gemma3Processor:
    tokenizer = byte_tokenizer(image_token="<image>", boi_token="<begin>", eoi_token="<end>")
    images = hf.Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    return hf.Gemma3Processor(images, tokenizer, image_seq_length=4)


def _voxtral() -> PreTrainedModel:
    # Of 16 frames at half of their rate each four are a token.
    tower = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.VoxtralConfig(
        audio_config={**tower, "num_mel_bins": 8, "max_source_positions": 16},
        text_config=dict(hf.LlamaConfig(**GROUPED).to_dict()),
        audio_token_id=IMAGE,
    )
    return hf.VoxtralForConditionalGeneration(config)


def _heard(rows: int) -> dict[str, Tensor]:
    found = described(rows, 4)
    del found["pixel_values"]
    return found | {"input_features": torch.randn(rows, 8, 32)}


def _transcribed(rows: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(rows, 8, 100), "labels": _uneven(torch.randint(256, (rows, 6)))}


def _spoken(rows: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(rows, 800), "labels": _uneven(torch.randint(5, 32, (rows, 6)))}


def _uneven(labels: Tensor) -> Tensor:
    """The first row is shorter."""
    labels[0, 4:] = -100
    return labels


def _segmented(rows: int) -> dict[str, Tensor]:
    labels = torch.randint(3, (rows, 32, 32))
    labels[0, :8] = 255  # the void of ADE20k and Cityscapes: counts nowhere
    return {"pixel_values": pixels(rows, 32), "labels": labels}


def _paired(rows: int) -> dict[str, Any]:
    drawn = torch.cat([torch.randint(256, (rows, 9)), torch.full((rows, 1), EOS)], dim=1)
    return {"input_ids": drawn, "pixel_values": pixels(rows), "return_loss": True}


MIXTURE = {"kind": "mixture of experts"}
VLM = {"kind": "vision-language", "auto": hf.AutoModelForImageTextToText, "task": "image-text-to-text"}

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "head_dim": 8,
}
# With heads of other sizes, and fewer, where attention is full.
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "head_dim": 4,
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": TOKENS,
}
GRANITE4 = {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 24,
}

ARCHITECTURES = [
    _decoder("Llama", hf.LlamaConfig(**GROUPED), hf.LlamaForCausalLM),
    _decoder("Mistral", hf.MistralConfig(**GROUPED, sliding_window=8), hf.MistralForCausalLM),
    _decoder("Qwen3", hf.Qwen3Config(**GROUPED, head_dim=4), hf.Qwen3ForCausalLM),
    _decoder("Qwen3.5", hf.Qwen3_5TextConfig(**GROUPED, **LINEAR), hf.Qwen3_5ForCausalLM),
    _decoder("Gemma 3 (text)", _gemma3_text(), hf.Gemma3ForCausalLM),
    _decoder("Gemma 4 (text)", hf.Gemma4TextConfig(**GROUPED, **GEMMA4), hf.Gemma4ForCausalLM),
    _decoder("SmolLM3", hf.SmolLM3Config(**GROUPED), hf.SmolLM3ForCausalLM),
    _decoder(
        "LFM2",
        hf.Lfm2Config(**GROUPED, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]),
        hf.Lfm2ForCausalLM,
    ),
    _decoder(
        "GPT-2",
        hf.GPT2Config(vocab_size=TOKENS, n_embd=16, n_layer=2, n_head=4, n_positions=64, **IDS),
        hf.GPT2LMHeadModel,
    ),
    _decoder(
        "OPT",
        hf.OPTConfig(**{k: v for k, v in TEXT.items() if k != "intermediate_size"}, ffn_dim=24, word_embed_proj_dim=16),
        hf.OPTForCausalLM,
    ),
    _decoder("GPT-NeoX", hf.GPTNeoXConfig(**TEXT), hf.GPTNeoXForCausalLM),
    _decoder(
        "Falcon",
        hf.FalconConfig(**SIZES, vocab_size=TOKENS, new_decoder_architecture=True, num_kv_heads=2, alibi=False, **IDS),
        hf.FalconForCausalLM,
    ),
    _decoder(
        "GPT-J", hf.GPTJConfig(vocab_size=TOKENS, n_embd=16, n_layer=2, n_head=4, rotary_dim=4), hf.GPTJForCausalLM
    ),
    _decoder("Phi-3", hf.Phi3Config(**GROUPED), hf.Phi3ForCausalLM),
    _decoder(
        "Mamba",
        hf.MambaConfig(vocab_size=TOKENS, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=4, **IDS),
        hf.MambaForCausalLM,
        note="`dt_proj` stays dense: the mixer multiplies with its weight by itself",
    ),
    _decoder("Mixtral", hf.MixtralConfig(**GROUPED, num_local_experts=4), hf.MixtralForCausalLM, **MIXTURE),
    _decoder(
        "Qwen3-MoE",
        hf.Qwen3MoeConfig(**GROUPED, head_dim=4, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2),
        hf.Qwen3MoeForCausalLM,
        **MIXTURE,
    ),
    _decoder(
        "Qwen3-Next",
        hf.Qwen3NextConfig(
            **GROUPED,
            **LINEAR,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        hf.Qwen3NextForCausalLM,
        **MIXTURE,
    ),
    _decoder("Granite 4", hf.GraniteMoeHybridConfig(**GROUPED, **GRANITE4), hf.GraniteMoeHybridForCausalLM, **MIXTURE),
    _decoder(
        "GPT-OSS",
        hf.GptOssConfig(**GROUPED, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        hf.GptOssForCausalLM,
        note="MXFP4 checkpoints are dequantised as they are loaded",
        **MIXTURE,
    ),
    _decoder(
        "DeepSeek-V3",
        hf.DeepseekV3Config(
            **TEXT,
            num_key_value_heads=4,
            moe_intermediate_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            first_k_dense_replace=1,
        ),
        hf.DeepseekV3ForCausalLM,
        **MIXTURE,
    ),
    _encoder("BERT", hf.BertConfig(**TEXT), hf.BertForMaskedLM),
    _encoder(
        "DistilBERT",
        hf.DistilBertConfig(
            vocab_size=TOKENS,
            dim=16,
            hidden_dim=24,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=64,
            num_labels=3,
            pad_token_id=PAD,
        ),
        hf.DistilBertForSequenceClassification,
    ),
    _encoder(
        "RoBERTa",
        hf.RobertaConfig(**{**TEXT, "max_position_embeddings": 400}, num_labels=3),
        hf.RobertaForSequenceClassification,
    ),
    _encoder(
        "ModernBERT",
        hf.ModernBertConfig(**TEXT, cls_token_id=BOS, sep_token_id=EOS, local_attention=8),
        hf.ModernBertForMaskedLM,
    ),
    _encoder(
        "ALBERT",
        hf.AlbertConfig(**TEXT, embedding_size=8),
        hf.AlbertForMaskedLM,
        refused=("`best`", "`2:4`"),
        note='its layers are one and the same: with `update="none"`',
    ),
    _translator(
        "T5",
        hf.T5Config(
            vocab_size=TOKENS,
            d_model=16,
            d_ff=24,
            d_kv=4,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
        ),
        hf.T5ForConditionalGeneration,
    ),
    _translator(
        "BART",
        hf.BartConfig(
            vocab_size=TOKENS,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=64,
            decoder_start_token_id=EOS,
            forced_eos_token_id=EOS,
            **IDS,
        ),
        hf.BartForConditionalGeneration,
    ),
    Architecture(
        "Whisper",
        "speech",
        hf.AutoModelForSpeechSeq2Seq,
        "automatic-speech-recognition",
        _whisper,
        _transcribed,
        _whisper_processor,
        {"inputs": speech(1.0)},
    ),
    _transcriber("wav2vec 2.0", hf.Wav2Vec2Config, hf.Wav2Vec2ForCTC),
    _transcriber(
        "WavLM",
        hf.WavLMConfig,
        hf.WavLMForCTC,
        note="its attention stays dense: a function of torch multiplies with those weights; not from disk",
        offloads=False,
    ),
    Architecture(
        "ViT",
        "vision",
        hf.AutoModelForImageClassification,
        "image-classification",
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3)),
        lambda rows: {"pixel_values": pixels(rows), "labels": torch.randint(3, (rows,))},
        lambda: hf.ViTImageProcessorPil(size={"height": 8, "width": 8}),
        {"inputs": image()},
    ),
    Architecture(
        "Swin",
        "vision",
        hf.AutoModelForImageClassification,
        "image-classification",
        _swin,
        lambda rows: {"pixel_values": pixels(rows, 16), "labels": torch.randint(3, (rows,))},
        lambda: hf.ViTImageProcessorPil(size={"height": 16, "width": 16}),
        {"inputs": image(16)},
    ),
    Architecture(
        "SegFormer",
        "vision",
        hf.AutoModelForSemanticSegmentation,
        "image-segmentation",
        _segformer,
        _segmented,
        lambda: hf.SegformerImageProcessorPil(size={"height": 32, "width": 32}),
        {"inputs": image(32)},
        note="a stage is a block",
    ),
    Architecture(
        "CLIP",
        "vision-language",
        hf.AutoModelForZeroShotImageClassification,
        "zero-shot-image-classification",
        _clip,
        _paired,
        lambda: hf.CLIPProcessor(_clip_images(), byte_tokenizer()),
        {"image": image(), "candidate_labels": ["a cat", "a dog"]},
        note="images with text, or batches with `return_loss=True`",
    ),
    Architecture(
        name="LLaVA",
        make=_llava,
        batch=lambda rows: described(rows, 4),
        process=_llava_processor,
        ask={"images": image(), "text": "<image> What is it?", "max_new_tokens": 4},
        **VLM,
    ),
    Architecture(
        name="SmolVLM",
        make=_smolvlm,
        batch=lambda rows: described(rows, 4) | {"pixel_values": pixels(rows)[:, None]},
        process=None,
        **VLM,
    ),
    Architecture(
        name="Qwen3.5 (vision)",
        make=_qwen,
        batch=_patched,
        process=None,
        note="batches of one row, whose patches cannot be told from another's",
        rows=1,
        **VLM,
    ),
    Architecture(
        name="Gemma 3 (vision)",
        make=_gemma3,
        batch=lambda rows: described(rows, 4),
        process=_gemma3_processor,
        ask={"images": image(), "text": "<begin> What is it?", "max_new_tokens": 4},
        **VLM,
    ),
    Architecture(
        name="Voxtral",
        kind="audio-language",
        auto=hf.AutoModelForMultimodalLM,
        task="audio-text-to-text",
        make=_voxtral,
        batch=_heard,
        process=None,
        note="with recordings not from disk: the tower reads its positions past the hook that loads them",
        offloads=False,
    ),
]
