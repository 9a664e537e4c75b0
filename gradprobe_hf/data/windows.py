"""Windows: `load_batches` turns whatever a user names as text or batches into `Batches`.

Documents are joined by a blank line and tokenised as one text, the tokens cut into consecutive full windows, the
windows shuffled with the seed, and the first `samples` taken. Each window begins with what the tokenizer begins a text
with, a BOS say, which counts as one of its tokens. Evaluation always draws with `EVALUATION_SEED`, so that perplexities
of runs with different seeds compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, from_iterable, from_rows, from_windows
from gradprobe_hf.data.pydoc_text import Part, manual_text
from gradprobe_hf.data.self_generated import own_text
from gradprobe_hf.data.sources import Source, is_dataset, is_streamed, is_tokenised, open_source, text_rows, texts_of
from gradprobe_hf.data.special_tokens import SpecialTokens, special_tokens
from gradprobe_hf.model.families import text_attribute

EVALUATION_SEED = 1
SEPARATOR = "\n\n"
CHARACTERS_PER_TOKEN = 8  # an upper estimate: how much of a stream is read before it is tokenised


@dataclass(frozen=True)
class TextOptions:
    """How a text becomes windows: options of `GradProbeConfig`, under the same names.

    Attributes:
        add_special_tokens: whether each window begins as the tokenizer begins a text.
    """

    add_special_tokens: bool = True


@dataclass(frozen=True)
class WindowSpec:
    """Which windows to draw from a text.

    Attributes:
        samples: windows.
        sequence_length: tokens in a window, special ones among them.
        batch_size: windows in a batch.
        seed: draws the calibration windows; evaluation has `EVALUATION_SEED`.
        text: how a text becomes windows.
    """

    samples: int
    sequence_length: int
    batch_size: int
    seed: int = 0
    text: TextOptions = TextOptions()

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence_length


def load_batches(
    source: Any,
    windows: WindowSpec,
    *,
    part: Part,
    model: PreTrainedModel,
    processing_class: Any,
    progress: bool = True,
) -> Batches:
    """Turn `source` into batches for `model`.

    Args:
        source: `"pydoc"`, `"self"`, a path, a Hub dataset `id[:config[:split]]`, a list of texts, a `Dataset` (text or
            `input_ids`), a `DataLoader` or another re-iterable of batches.
        windows: what to draw. Batches passed as such are all used, as they are.
        part: which split of a dataset, or half of `"pydoc"`.
        processing_class: the tokenizer, or a processor with one; needed for text.

    Raises:
        ValueError: too little text, no tokenizer, windows that the model cannot take, or a source of an unknown kind.
        OSError: the Hub cannot be reached.
    """
    if part == "evaluation":
        windows = replace(windows, seed=EVALUATION_SEED)
    source = str(source) if isinstance(source, Path) else source
    if isinstance(source, str) and source == "self":
        return _self_generated(model, windows, progress)
    opened = _open(source, part, windows.seed)
    if opened is None:
        return from_iterable(source, type(source).__name__)
    if is_tokenised(opened.rows):
        found = _tokenised(opened, windows, processing_class)
        _check_length(model, max(batch["input_ids"].shape[1] for batch in found))
        return found
    _check_length(model, windows.sequence_length)
    ids = _token_ids(opened, processing_class, windows.tokens)
    return _drawn(opened, ids, windows, special_tokens(processing_class, model, windows.text.add_special_tokens))


def _self_generated(model: PreTrainedModel, windows: WindowSpec, progress: bool) -> Batches:
    samples, length, seed = windows.samples, windows.sequence_length, windows.seed
    _check_length(model, length)
    ids = own_text(model, samples, length, seed, progress)
    protocol = f"{samples} windows of {length} tokens sampled from the model at temperature 1, seed {seed}"
    return from_windows(ids, windows.batch_size, source="written by the model itself", protocol=protocol)


def _open(source: Any, part: Part, seed: int) -> Source | None:
    """The source as rows; None if it is batches already."""
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
    """The token ids `[tokens]` of a text; of a stream at least `needed`, if it has them."""
    if processing_class is None:
        raise ValueError(
            "text needs a tokenizer and none was found beside the model: pass processing_class=, or give batches."
        )
    texts = texts_of(opened.rows)
    if is_streamed(opened.rows):
        texts = iter(_enough(texts, needed * CHARACTERS_PER_TOKEN))
    tokenizer = getattr(processing_class, "tokenizer", processing_class)  # a processor has one
    # `verbose=False`: a tokenizer warns that a whole text is longer than its model's context, and it is cut below.
    encoded = tokenizer(SEPARATOR.join(texts), add_special_tokens=False, verbose=False)
    return torch.tensor(encoded["input_ids"], dtype=torch.long)


def _enough(texts: Iterable[str], characters: int) -> list[str]:
    """The first texts with so many characters in all; the rest of a stream is never read."""
    taken: list[str] = []
    for text in texts:
        taken.append(text)
        characters -= len(text)
        if characters <= 0:
            break
    return taken


def _drawn(opened: Source, ids: Tensor, windows: WindowSpec, special: SpecialTokens) -> Batches:
    """Windows of a text, given its token ids `[tokens]`."""
    samples, length, seed = windows.samples, windows.sequence_length, windows.seed
    own = length - len(special)  # tokens of a window that are of the text
    if own < 1:
        raise ValueError(
            f"sequence_length={length} leaves no room for text: of a window {special.described}. Ask for longer ones."
        )
    whole = len(ids) // own
    if whole < samples:
        raise ValueError(
            f"{opened.name} holds {len(ids):,} tokens, which is {whole} full windows of {own}; {samples} windows "
            f"need {samples * own:,} tokens. Give more text, or ask for "
            + (f"at most {whole} samples or shorter windows." if whole else "shorter windows.")
        )
    order = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))
    drawn = special.around(ids[: whole * own].view(whole, own)[order[:samples]])
    streamed = ", of rows drawn from a stream" if is_streamed(opened.rows) else ""
    protocol = (
        f"{samples} windows of {length} tokens, cut one after the other from the tokenised text "
        f"({special.described}{streamed}), shuffled with seed {seed}"
    )
    return from_windows(
        drawn,
        windows.batch_size,
        unpredicted=special.unpredicted,
        source=opened.name,
        protocol=protocol,
        dataset_id=opened.dataset_id,
    )


def _tokenised(opened: Source, windows: WindowSpec, processing_class: Any) -> Batches:
    """Rows of a dataset that has `input_ids`: shuffled, and neither cut nor joined."""
    assert not isinstance(opened.rows, list), "plain texts are not tokenised"
    rows = opened.rows.shuffle(seed=windows.seed)
    keep = [name for name in ("input_ids", "attention_mask", "labels", "token_type_ids") if name in rows.column_names]
    taken = [{name: torch.as_tensor(row[name]) for name in keep} for row in islice(rows, windows.samples)]
    if len(taken) < windows.samples:
        raise ValueError(f"{opened.name} holds {len(taken)} tokenised rows and {windows.samples} were asked for.")
    pad = getattr(processing_class, "pad_token_id", None) or 0  # any id will do: padding is masked
    protocol = f"{windows.samples} tokenised rows, shuffled with seed {windows.seed}"
    return from_rows(
        taken, windows.batch_size, pad, source=opened.name, protocol=protocol, dataset_id=opened.dataset_id
    )


def _check_length(model: PreTrainedModel, length: int) -> None:
    longest = text_attribute(model.config, "max_position_embeddings")
    if longest is not None and length > longest:
        raise ValueError(
            f"sequence_length={length} is more than the {longest} positions of {type(model).__name__} "
            f"(max_position_embeddings); pass sequence_length={longest}, or rows of that many tokens at most."
        )
