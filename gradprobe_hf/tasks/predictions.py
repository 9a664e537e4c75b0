"""Predictions: a model and a batch with labels -> what it predicts, and what is right.

Labels stay tensors on the model's device, those that count nowhere among them: to read one, or to know how many count,
would wait for it in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.languages import begun_in
from gradprobe_hf.tasks.media_tokens import words_of

# Tokens that a text may be longer than its reference.
SLACK = 16
# What configurations call the positions of a decoder -> tokens that it begins with: Whisper's has a few of its own.
_POSITIONS = {"max_target_positions": 8, "max_decoder_position_embeddings": 1, "max_position_embeddings": 1}
Predicted = tuple[Any, Any]


def predicted_labels(model: Any, batch: Mapping[str, Any], _: Any) -> Predicted:
    """The most likely class of each row, or of each token; the label is -100 where there is none. Both of one shape."""
    found = model(**_inputs(batch)).logits.argmax(-1)
    return found, batch["labels"].to(found.device)


def predicted_next(model: Any, batch: Mapping[str, Any], _: Any) -> Predicted:
    """The most likely next tokens; the label is -100 where the next one is none. Both `[rows, tokens - 1]`."""
    labels, ids = batch.get("labels"), batch["input_ids"]
    labels = (words_of(ids, model.config) if labels is None else labels)[:, 1:]
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == batch["input_ids"].shape:  # one of pairs of tokens is none of padding
        # With left padding, the last pad predicts the first token.
        labels = labels.masked_fill((mask[:, 1:] == 0) | (mask[:, :-1] == 0), IGNORED)
    found = model(**_inputs(batch), use_cache=False).logits.argmax(-1)[:, :-1]
    return found, labels.to(found.device)


def written_texts(model: Any, batch: Mapping[str, Any], processing_class: Any) -> Predicted:
    """What the model writes, token after token the most likely one, and the texts that it should write."""
    labels = batch["labels"]
    room = min((labels.shape[1] + SLACK, *_room(model.config.get_text_config(decoder=True))))
    # Processes that share a model gather its weights at every token: all go on until the last one has finished.
    ids = model.generate(
        **_inputs(batch),
        **begun_in(getattr(processing_class, "tokenizer", processing_class), model.generation_config),
        max_new_tokens=room,
        do_sample=False,
        num_beams=1,
        synced_gpus=_is_sharded(model),
    )
    begun = model.generation_config.decoder_start_token_id
    # A row that is alone has this token for its last.
    forced = model.generation_config.forced_eos_token_id is not None
    ids = _cut_off(ids, labels, (int((ids[:, 0] == begun).all()) if isinstance(begun, int) else 0) - forced)
    return _decoded(ids, processing_class), _decoded(labels, processing_class)


def transcribed(model: Any, batch: Mapping[str, Any], processing_class: Any) -> Predicted:
    """What a model that is trained with CTC hears: the most likely token of each frame, and what was said."""
    found = model(**_inputs(batch)).logits.argmax(-1)
    if (mask := batch.get("attention_mask")) is not None and hasattr(model, "_get_feat_extract_output_lengths"):
        lengths = model._get_feat_extract_output_lengths(mask.sum(-1))
        silent = torch.arange(found.shape[1], device=found.device) >= lengths.to(found.device)[:, None]
        found = found.masked_fill(silent, model.config.pad_token_id)  # CTC's blank
    labels = batch["labels"].masked_fill(batch["labels"] == IGNORED, model.config.pad_token_id)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    heard, said = tokenizer.batch_decode(found), tokenizer.batch_decode(labels, group_tokens=False)
    return heard, said


def _room(config: Any) -> Iterator[int]:
    """Tokens that a decoder has positions for, by each name that these have, less those that it begins with."""
    for name, begun in _POSITIONS.items():
        if limit := getattr(config, name, None):
            yield limit - begun


def _inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is given to predict from."""
    return {name: value for name, value in batch.items() if name not in ("labels", "decoder_input_ids")}


def _cut_off(ids: Tensor, labels: Tensor, begun: int) -> Tensor:
    """Texts `[rows, tokens]` as long as each may be: a batch goes on for the longest of its references `labels`.

    Args:
        begun: tokens that are not written; Whisper leaves its own out.
    """
    may_be = begun + (labels != IGNORED).sum(1, keepdim=True) + SLACK
    return ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= may_be.to(ids.device), IGNORED)


def _decoded(ids: Tensor, processing_class: Any) -> list[str]:
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    pad = tokenizer.pad_token_id
    plain = ids.masked_fill(ids == IGNORED, tokenizer.eos_token_id if pad is None else pad)
    return [text.strip() for text in tokenizer.batch_decode(plain, skip_special_tokens=True)]


def _is_sharded(model: Any) -> bool:
    return type(model).__name__.startswith("FSDP")
