"""Tiny models of every task that reads rows, with rows of a data set for each: real processors, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from PIL import Image
from tokenizers import pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
    Wav2Vec2Processor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.windows import TextOptions, WindowSpec, load_batches
from gradprobe_hf.tasks.table import task_of_class
from tests import cases

LABELS = {"negative": 0, "neutral": 1, "positive": 2}
WORD_LABELS = {"O": 0, "B-PER": 1, "B-LOC": 2}
ROWS = 8


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with a mask token, in the place of `<unk>`."""
    found = cases.tokenizer()
    found.add_special_tokens({"mask_token": "<unk>"})
    return found


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes of words that are split already: each begins with a blank."""
    found = cases.tokenizer()
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return found


def _bert(cls: Any, labels: dict[str, int]) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=cases.VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=258,
        label2id=labels,
        id2label={number: name for name, number in labels.items()},
    )
    return cls(config)


def _llama_classifier() -> PreTrainedModel:
    from transformers import LlamaForSequenceClassification

    config = cases.llama().config
    config.num_labels = 3
    config.label2id, config.id2label = LABELS, {number: name for name, number in LABELS.items()}
    return LlamaForSequenceClassification(config)


def _whisper() -> PreTrainedModel:
    config = WhisperConfig(
        vocab_size=cases.VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=40,
        decoder_start_token_id=256,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **cases.SPECIAL,
    )
    return WhisperForConditionalGeneration(config)


@dataclass(frozen=True)
class SpeechProcessor:
    """Whisper's extractor with a byte tokenizer: its own processor takes Whisper's own tokenizer alone."""

    feature_extractor: WhisperFeatureExtractor
    tokenizer: PreTrainedTokenizerFast


def _whisper_processor() -> SpeechProcessor:
    return SpeechProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), cases.tokenizer())


def _wav2vec2() -> PreTrainedModel:
    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(8, 8),
        conv_kernel=(16, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
    )
    return Wav2Vec2ForCTC(config)


def _classifies_recordings() -> PreTrainedModel:
    config = _wav2vec2().config
    config.feat_extract_norm, config.classifier_proj_size = "layer", 16  # as models that are trained with masks
    config.label2id, config.id2label = LABELS, {number: name for name, number in LABELS.items()}
    return Wav2Vec2ForSequenceClassification(config)


def _wav2vec2_processor() -> Wav2Vec2Processor:
    import json
    import tempfile

    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # it takes a file alone
        json.dump({letter: number for number, letter in enumerate(letters)}, file)
        file.flush()
        spelled = Wav2Vec2CTCTokenizer(file.name)
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=16_000, return_attention_mask=True)
    return Wav2Vec2Processor(feature_extractor=extractor, tokenizer=spelled)


def _llava() -> PreTrainedModel:
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    text = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        vocab_size=cases.VOCABULARY + 1,
        **cases.SPECIAL,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=cases.VOCABULARY)
    return LlavaForConditionalGeneration(config)


def _llava_processor() -> LlavaProcessor:
    words = cases.tokenizer()
    words.add_tokens(["<image>"], special_tokens=True)
    images = CLIPImageProcessorPil(size={"height": 8, "width": 8}, do_center_crop=False)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _images(count: int) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (9, 7, 3), dtype=np.uint8)) for _ in range(count)]


def _waves(count: int) -> list[list[float]]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=1600 + 160 * number).tolist() for number in range(count)]


def texts(count: int = ROWS) -> list[str]:
    return [f"sentence {'so ' * (number % 5)}{number}" for number in range(count)]


def classified() -> Dataset:
    return Dataset.from_dict({"sentence": texts(), "label": [number % 3 for number in range(ROWS)]})


def _tagged() -> Dataset:
    words = [text.split() for text in texts()]
    tags = [[number % 3 for number, _ in enumerate(one)] for one in words]
    features = Features(
        {"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=list(WORD_LABELS)))}
    )
    return Dataset.from_dict({"tokens": words, "ner_tags": tags}, features=features)


@dataclass(frozen=True)
class LabelledCase:
    """A model, what reads its rows, the rows, and what the task is called."""

    make: Callable[[], PreTrainedModel]
    processor: Callable[[], Any]
    rows: Callable[[], Dataset]
    task: str
    metric: str | None


CASES = {
    "bert": LabelledCase(
        lambda: _bert(BertForSequenceClassification, LABELS), tokenizer, classified, "text-classification", "accuracy"
    ),
    "llama": LabelledCase(_llama_classifier, cases.tokenizer, classified, "text-classification", "accuracy"),
    "tags": LabelledCase(
        lambda: _bert(BertForTokenClassification, WORD_LABELS),
        word_tokenizer,
        _tagged,
        "token-classification",
        "accuracy",
    ),
    "masked": LabelledCase(
        cases.bert, tokenizer, lambda: Dataset.from_dict({"text": [" ".join(texts(40))]}), "fill-mask", None
    ),
    "t5": LabelledCase(
        cases.t5,
        cases.tokenizer,
        lambda: Dataset.from_dict({"document": texts(), "summary": [text[::-1] for text in texts()]}),
        "text2text-generation",
        None,
    ),
    "vit": LabelledCase(
        cases.vit,
        lambda: ViTImageProcessorPil(size={"height": 8, "width": 8}),
        lambda: Dataset.from_dict({"image": _images(ROWS), "label": [number % 3 for number in range(ROWS)]}),
        "image-classification",
        "accuracy",
    ),
    "whisper": LabelledCase(
        _whisper,
        _whisper_processor,
        lambda: Dataset.from_dict({"audio": _waves(ROWS), "text": texts()}),
        "automatic-speech-recognition",
        "wer",
    ),
    "wav2vec2": LabelledCase(
        _wav2vec2,
        _wav2vec2_processor,
        lambda: Dataset.from_dict({"audio": _waves(ROWS), "text": ["ab cd", "abc"] * (ROWS // 2)}),
        "automatic-speech-recognition",
        "wer",
    ),
    "recordings": LabelledCase(
        _classifies_recordings,
        lambda: _wav2vec2_processor().feature_extractor,
        lambda: Dataset.from_dict({"audio": _waves(ROWS), "label": [number % 3 for number in range(ROWS)]}),
        "audio-classification",
        "accuracy",
    ),
    "llava": LabelledCase(
        _llava,
        _llava_processor,
        lambda: Dataset.from_dict({"image": _images(ROWS), "text": texts()}),
        "image-text-to-text",
        None,
    ),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A model whose weights are large enough that predictions differ from row to row."""
    torch.manual_seed(seed)
    model = CASES[name].make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model.eval()


def batches(
    name: str,
    rows: Any = None,
    *,
    samples: int = 4,
    length: int = 32,
    batch_size: int = 2,
    label_column: str | None = None,
    model: PreTrainedModel | None = None,
    processor: Any = None,
    **text: Any,
) -> Any:
    """The batches that a case's rows make, or these rows of a model and a processor."""
    case = CASES[name]
    model = model or build(name)
    return load_batches(
        case.rows() if rows is None else rows,
        WindowSpec(samples, length, batch_size, text=TextOptions(**text)),
        part="calibration",
        model=model,
        processing_class=processor or case.processor(),
        task=TaskOptions(task_of_class(type(model).__name__), label_column),
        progress=False,
    )
