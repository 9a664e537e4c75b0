"""load_batches: one function from anything a user may name to `Batches`.

Text is tokenised without special tokens, documents joined by a blank line, the tokens cut into consecutive full
windows, the windows shuffled with the seed and the first `samples` taken. Evaluation always draws with
`EVALUATION_SEED`, so that perplexities of runs with different seeds compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, from_iterable, from_rows, from_windows
from gradprobe_hf.data.pydoc_text import Part, manual_text
from gradprobe_hf.data.self_generated import own_text
from gradprobe_hf.data.sources import Source, is_dataset, is_streamed, is_tokenised, open_source, text_rows, texts_of
from gradprobe_hf.model.families import text_attribute

EVALUATION_SEED = 1
SEPARATOR = "\n\n"
CHARACTERS_PER_TOKEN = 8  # an upper estimate: how much of a stream is read before it is tokenised


def load_batches(
    source: Any,
    *,
    part: Part,
    model: PreTrainedModel,
    processing_class: Any,
    samples: int,
    sequence_length: int,
    batch_size: int,
    seed: int,
    progress: bool = True,
) -> Batches:
    """Turn `source` into batches for `model`.

    Args:
        source: `"pydoc"`, `"self"`, a path, a Hub dataset `id[:config[:split]]`, a list of texts, a `Dataset` (text or
            `input_ids`), a `DataLoader` or another re-iterable of batches.
        part: which split, or half of `"pydoc"`.
        processing_class: the tokenizer; needed for text.
        samples: windows to draw. Batches given as such are all used.
        sequence_length: tokens in a window.
        batch_size: windows in a batch.
        seed: draws the windows (calibration); evaluation uses `EVALUATION_SEED`.

    Raises:
        ValueError: too little text, no tokenizer, windows the model cannot take, or a source of an unknown kind.
        OSError: the Hub cannot be reached.
    """
    seed = EVALUATION_SEED if part == "evaluation" else seed
    source = str(source) if isinstance(source, Path) else source
    shape = {"samples": samples, "length": sequence_length, "seed": seed}
    if isinstance(source, str) and source == "self":
        _check_length(model, sequence_length)
        windows = own_text(model, samples, sequence_length, seed, progress)
        protocol = f"{samples} windows of {sequence_length} tokens sampled from the model at temperature 1, seed {seed}"
        return from_windows(windows, batch_size, source="written by the model itself", protocol=protocol)
    opened = _open(source, part, seed)
    if opened is None:
        return from_iterable(source, type(source).__name__)
    if is_tokenised(opened.rows):
        found = _tokenised(opened, samples, batch_size, seed, processing_class)
        _check_length(model, max(batch["input_ids"].shape[1] for batch in found))
        return found
    _check_length(model, sequence_length)
    windows = _cut(_token_ids(opened, processing_class, samples * sequence_length), opened.name, **shape)
    streamed = is_streamed(opened.rows)
    protocol = (
        f"{samples} windows of {sequence_length} tokens, cut one after the other from the tokenised text "
        f"(no special tokens{', of rows drawn from a stream' if streamed else ''}), shuffled with seed {seed}"
    )
    return from_windows(windows, batch_size, source=opened.name, protocol=protocol, dataset_id=opened.dataset_id)


def _open(source: Any, part: Part, seed: int) -> Source | None:
    """The source as rows, or None when it already is batches."""
    if isinstance(source, str):
        if source == "pydoc":
            return Source(text_rows([manual_text(part)]), f"pydoc ({part} part): the Python manual's topics")
        return open_source(source, part, seed)
    if is_dataset(source):
        name = getattr(source.info, "dataset_name", None)
        return Source(source, f"a Dataset ({name})" if name else "a Dataset")
    if isinstance(source, Sequence) and source and not isinstance(source[0], Mapping):
        return Source(text_rows(source), f"{len(source)} texts")
    if not isinstance(source, Iterable):
        raise ValueError(
            f"calibration and evaluation take a name, a path, texts, a Dataset or batches, got {type(source).__name__}."
        )
    return None


def _token_ids(opened: Source, processing_class: Any, needed: int) -> Tensor:
    if processing_class is None:
        raise ValueError(
            "text needs a tokenizer and none was found beside the model: pass processing_class=, or give batches."
        )
    texts = texts_of(opened.rows)
    if is_streamed(opened.rows):
        texts = iter(_enough(texts, needed * CHARACTERS_PER_TOKEN))
    tokenizer = getattr(processing_class, "tokenizer", processing_class)  # a processor has one
    encoded = tokenizer(SEPARATOR.join(texts), add_special_tokens=False, verbose=False)
    return torch.tensor(encoded["input_ids"], dtype=torch.long)


def _enough(texts: Iterable[str], characters: int) -> list[str]:
    taken: list[str] = []
    for text in texts:
        taken.append(text)
        characters -= len(text)
        if characters <= 0:
            break
    return taken


def _cut(ids: Tensor, name: str, samples: int, length: int, seed: int) -> Tensor:
    whole = len(ids) // length
    if whole < samples:
        raise ValueError(
            f"{name} holds {len(ids):,} tokens, which is {whole} full windows of {length}; {samples} windows need "
            f"{samples * length:,} tokens. Give more text, or ask for "
            + (f"at most {whole} samples or shorter windows." if whole else "shorter windows.")
        )
    windows = ids[: whole * length].view(whole, length)
    return windows[torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:samples]]


def _tokenised(opened: Source, samples: int, batch_size: int, seed: int, processing_class: Any) -> Batches:
    assert not isinstance(opened.rows, list), "plain texts are not tokenised"
    rows = opened.rows.shuffle(seed=seed)
    keep = [name for name in ("input_ids", "attention_mask", "labels", "token_type_ids") if name in rows.column_names]
    taken = [{name: torch.as_tensor(row[name]) for name in keep} for _, row in zip(range(samples), rows, strict=False)]
    if len(taken) < samples:
        raise ValueError(f"{opened.name} holds {len(taken)} tokenised rows and {samples} were asked for.")
    pad = getattr(processing_class, "pad_token_id", None) or 0
    protocol = f"{samples} tokenised rows, shuffled with seed {seed}"
    return from_rows(taken, batch_size, pad, source=opened.name, protocol=protocol, dataset_id=opened.dataset_id)


def _check_length(model: PreTrainedModel, length: int) -> None:
    longest = text_attribute(model.config, "max_position_embeddings")
    if longest is not None and length > longest:
        raise ValueError(
            f"sequence_length={length} is more than the {longest} positions of {type(model).__name__} "
            f"(max_position_embeddings); pass sequence_length={longest}, or rows of that many tokens at most."
        )
