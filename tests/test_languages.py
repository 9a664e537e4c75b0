"""Models of several languages: the decoder is told in calibration what it is told when it writes."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset
from tokenizers import pre_tokenizers
from transformers import (
    MBartConfig,
    MBartForConditionalGeneration,
    NllbTokenizer,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.windows import TextOptions, WindowSpec, load_batches
from gradprobe_hf.tasks.predictions import written_texts
from gradprobe_hf.tasks.table import task_of_class
from tests import labelled

RATE = 16000
SPEECH = {"audio": [{"array": [0.1] * RATE, "sampling_rate": RATE}] * 2, "text": ["ab", "abc"]}


def _tokenizer(**told: str) -> WhisperTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    special += ["<|translate|>", "<|transcribe|>", "<|notimestamps|>"]
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, *special])}
    return WhisperTokenizer(vocab=vocabulary, merges=[], **told)


def _model(**generation: str) -> WhisperForConditionalGeneration:
    tokenizer, model = _tokenizer(), labelled.build("whisper")
    assert isinstance(model, WhisperForConditionalGeneration)
    ids = tokenizer.convert_tokens_to_ids
    model.config.decoder_start_token_id = ids("<|startoftranscript|>")
    model.resize_token_embeddings(len(tokenizer))
    known = model.generation_config
    known.lang_to_id = {f"<|{code}|>": ids(f"<|{code}|>") for code in LANGUAGES}
    known.task_to_id = {task: ids(f"<|{task}|>") for task in ("translate", "transcribe")}
    for name, value in generation.items():
        setattr(known, name, value)
    return model


def _labels(model: WhisperForConditionalGeneration, tokenizer: WhisperTokenizer) -> list[list[int]]:
    processor = WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer)
    return _read(model, processor, SPEECH)[0]["labels"].tolist()


def _read(model, processor, columns):
    return load_batches(
        Dataset.from_dict(columns),
        WindowSpec(2, 32, 2, text=TextOptions()),
        part="calibration",
        model=model,
        processing_class=processor,
        task=TaskOptions(task_of_class(type(model).__name__), None),
        progress=False,
    ).items


@pytest.mark.parametrize("language", ["german", "de", "<|de|>"])
def test_the_language_of_generate_is_that_of_the_calibration(language, caplog):
    """As the tokenizer itself writes it, once it is told."""
    wanted = _labels(_model(), _tokenizer(language="german", task="transcribe"))
    assert _labels(_model(language=language), _tokenizer()) == wanted
    german = _tokenizer().convert_tokens_to_ids("<|de|>")
    assert wanted[0][0] == german
    assert "language" not in caplog.text


def test_a_translation_is_calibrated_as_one():
    wanted = _labels(_model(), _tokenizer(language="german", task="translate"))
    assert _labels(_model(language="german", task="translate"), _tokenizer()) == wanted


def test_a_model_that_nobody_told_a_language_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        found = _labels(_model(), _tokenizer())
    assert "calibrated without the token of a language" in caplog.text
    assert found[0][0] == _tokenizer().convert_tokens_to_ids("<|notimestamps|>")


def test_a_language_that_the_model_has_not_is_refused():
    with pytest.raises(ValueError, match="language='klingon' is none of the model's"):
        _labels(_model(language="klingon"), _tokenizer())


def _translator():
    """A model, what its tokenizer is made of, and rows."""
    symbols = ("<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "eng_Latn", "deu_Latn")
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    config = MBartConfig(vocab_size=16, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    config.decoder_attention_heads, config.encoder_ffn_dim, config.decoder_ffn_dim = 2, 8, 8
    options = {"vocab": vocabulary, "src_lang": "eng_Latn", "additional_special_tokens": ["eng_Latn", "deu_Latn"]}
    return MBartForConditionalGeneration(config).eval(), options, {"text": ["a", "b"], "target": ["b", "a"]}


def test_texts_to_write_are_not_marked_as_the_sources():
    model, options, rows = _translator()
    with pytest.raises(ValueError, match=r"no target language.*'eng_Latn'.*tgt_lang="):
        _read(model, NllbTokenizer(**options), rows)


def test_a_translator_is_told_the_language_that_it_is_calibrated_and_measured_in(monkeypatch):
    model, options, rows = _translator()
    told = NllbTokenizer(**options, tgt_lang="deu_Latn")
    (batch,) = _read(model, told, rows)
    german = told.convert_tokens_to_ids("deu_Latn")
    assert batch["labels"][:, 0].tolist() == [german, german]
    written = []
    generate = type(model).generate

    def kept(self, *args, **options):
        written.append(generate(self, *args, **options))
        return written[-1]

    monkeypatch.setattr(type(model), "generate", kept)
    written_texts(model, batch, told)
    assert written[0][:, 1].tolist() == [german, german]  # behind what the decoder starts with
