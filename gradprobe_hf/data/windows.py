"""Windows: `load_batches` turns whatever a user names as text or batches into `Batches`.

A source is opened (`sources`), its rows are read as texts or chats (`documents`, `chat`), and windows are drawn from
their tokens (`packing`). Evaluation always draws with `EVALUATION_SEED`, so that perplexities of runs with different
seeds compare.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gradprobe_hf.data.batch_checks import check_named_in_row, check_one_length, check_reads_text
from gradprobe_hf.data.batches import Batches, from_iterable, from_rows
from gradprobe_hf.data.labelled import Labels, TaskOptions
from gradprobe_hf.data.prepared_rows import tensor_of
from gradprobe_hf.data.sources import (
    Source,
    columns_of,
    is_dataset,
    is_tokenised,
    open_source,
    rows_from,
    seeded,
    shuffled,
    text_rows,
)
from gradprobe_hf.data.text.documents import holds_chats
from gradprobe_hf.data.text.mixture import held_share, in_proportion, is_mixture, mixed, shares
from gradprobe_hf.data.text.packing import Drawn, WindowSpec, draw_documents, draw_packed, rows_of, silent_rows
from gradprobe_hf.data.text.pydoc_text import Part, manual_text
from gradprobe_hf.data.text.self_generated import KeptText, own_text
from gradprobe_hf.data.text.special_tokens import is_tokenizer, special_tokens, tokenizer_of
from gradprobe_hf.data.text.text_options import DEFAULT_LENGTH, OWN_TEXT, PYDOC, SELF, TextOptions
from gradprobe_hf.model.families import longest_text
from gradprobe_hf.model.loading.pooling import embedded_tokens
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.tasks.columns import IGNORED

logger = logging.getLogger(__name__)

_RUN = 8  # tokens: a text hardly says one so often
_COUNTS = ("completion_mask", "assistant_masks")  # of tokenised rows: 1 where a token counts in the loss

__all__ = ["TextOptions", "WindowSpec", "load_batches"]

EVALUATION_SEED = 1
WINDOWS_MEASURED = 20  # of an evaluation, where no number was asked for


def load_batches(
    source: Any,
    windows: WindowSpec,
    *,
    part: Part,
    model: PreTrainedModel,
    processing_class: Any,
    task: TaskOptions | None = None,
    writing: Writing | None = None,
    is_alone: bool = False,
    progress: bool = True,
) -> Batches:
    """Turn `source` into batches for `model`.

    Args:
        source: `"pydoc"`, `"self"`, a path, a Hub dataset `id[:config[:split]]`, a list of texts or of rows (dicts), a
            `Dataset` (text, chats or `input_ids`), any of these opened as rows, a `DataLoader` or another re-iterable
            of batches. Or a mixture: a dict of names and weights.
        windows: what to draw. Batches passed as such are all used, as they are.
        part: which split of a dataset, or half of `"pydoc"`.
        processing_class: the tokenizer, or a processor with one; needed for text.
        task: what the model is for: how rows with labels, images or speech become batches.
        writing: who writes the model's own text, and where it is kept.
        is_alone: whether no other text is read with these options: then they are about chats here or nowhere.

    Raises:
        ValueError: too little text, no tokenizer, windows that the model cannot take, or a source of an unknown kind.
        OSError: the Hub cannot be reached.
    """
    if isinstance(source, Batches):
        return source
    if part == "evaluation":
        windows = replace(windows, seed=EVALUATION_SEED)
    source = str(source) if isinstance(source, Path) else source
    labels = None if task is None else Labels.of(task, windows, model, processing_class)
    if labels is not None and is_mixture(source) and not labels.spec.task.takes_text_alone:
        shares(source, windows.samples)  # what is wrong with it as a mixture, a DatasetDict say
        reads = labels.spec.task
        raise ValueError(f"a mixture is of texts, and {reads.name} reads {reads.data}: give one data set of them.")
    if labels is not None and not is_mixture(source) and not _is_self(source):
        source = open_rows(source, part, windows.seed) or source
        if isinstance(source, Source) and (found := labels.batches(source)) is not None:
            return found
    reader = _Reader(part, model, processing_class, writing or Writing(), progress)
    has_to_be_chats = windows.text.assistant_only_loss and (is_alone or part == "calibration") and not windows.held_out
    if is_mixture(source):
        drawn: Drawn | None = reader.mixed(source, windows, has_to_be_chats, labels)
    else:
        source = reader.opened(source, windows.seed)
        if has_to_be_chats:
            _check_chats([source], windows.text)
        drawn = reader.drawn(source, windows)
    if drawn is None:
        return from_iterable(source, type(source).__name__)
    if not drawn.rows:
        return Batches.none()  # nothing is left to hold out
    pad = getattr(tokenizer_of(processing_class), "pad_token_id", None) or 0  # any id will do: padding is masked
    found = from_rows(drawn.rows, windows.batch_size, pad, **drawn.described())
    return found if labels is None else labels.of_windows(found)


def _is_self(source: Any) -> bool:
    return isinstance(source, str) and source == SELF


@dataclass(frozen=True)
class Writing:
    """Who writes the model's own text: these processes share it. `kept`: where it is kept, if it is."""

    processes: Processes = field(default_factory=Processes)
    kept: KeptText | None = None


@dataclass(frozen=True)
class _Reader:
    """Whom the rows are for."""

    part: Part
    model: PreTrainedModel
    processing_class: Any
    writing: Writing
    progress: bool

    def opened(self, source: Any, seed: int) -> Any:
        """The source as rows, where it is a name or rows."""
        return source if _is_self(source) else open_rows(source, self.part, seed) or source

    def drawn(self, opened: Any, windows: WindowSpec) -> Drawn | None:
        """Rows of a source that is opened; None if it is batches already. Where no chat is, all tokens count."""
        if not windows.text.assistant_only_loss or _is_chats(opened, windows.text):
            return self._drawn(opened, windows)
        drawn = self._drawn(opened, replace(windows, text=replace(windows.text, assistant_only_loss=False)))
        return drawn and replace(drawn, protocol=f"{drawn.protocol}; all tokens count, for these are no chats")

    def _drawn(self, opened: Any, windows: WindowSpec) -> Drawn | None:
        if _is_self(opened):
            return self._written(windows)
        if not isinstance(opened, Source):
            return None
        if is_tokenised(opened.rows) and not windows.text.names_text:
            drawn = _tokenised(opened, windows)
            check_length(self.model, max((len(row["input_ids"]) for row in drawn.rows), default=0))
            return drawn
        check_reads_text(self.model, self.part)
        check_length(self.model, windows.sequence_length)
        if not is_tokenizer(tokenizer_of(self.processing_class)):
            found = "" if self.processing_class is None else f" but a {type(self.processing_class).__name__}"
            raise ValueError(
                f"{opened.name} is text, which needs a tokenizer, and none was found beside the model{found}: save it "
                "into the model's folder, or, in Python, hand it over as processing_class."
            )
        special = special_tokens(self.processing_class, self.model, windows.text.add_special_tokens)
        draw = draw_packed if windows.text.packing or opened.is_whole else draw_documents
        return draw(opened, windows, self.processing_class, special)

    def mixed(
        self, weights: Mapping[str, float], windows: WindowSpec, has_to_be_chats: bool, labels: Labels | None
    ) -> Drawn:
        """Rows of several sources, as many of each as its weight says.

        Args:
            has_to_be_chats: whether one of them has to be.
            labels: what would read the rows of one of them by itself.

        Raises:
            ValueError: images in one of them, of which the texts alone would be read.
        """
        counts = shares(weights, windows.samples)
        opened = {name: self.opened(name, windows.seed) for name in counts}
        if labels is not None:
            labels.check_texts(one for one in opened.values() if isinstance(one, Source))
        if has_to_be_chats:
            _check_chats(list(opened.values()), windows.text)
        parts: dict[str, Drawn] = {}
        for name in sorted(counts, key=_is_self):  # to write is expensive: what cannot be read is told before
            wanted = counts[name]
            if windows.at_most and parts and _is_self(name):  # what is cut off would be written in vain
                wanted = min(wanted, math.ceil(held_share(parts, counts) * wanted - 1e-9))
            drawn = self.drawn(opened[name], replace(windows, samples=max(1, wanted)))
            assert drawn is not None, "a name is no batches"
            parts[name] = drawn
        parts = {name: parts[name] for name in counts}
        return mixed(in_proportion(parts, counts) if windows.at_most else parts, weights, windows.seed)

    def _written(self, windows: WindowSpec) -> Drawn:
        samples, length, seed = windows.samples, windows.sequence_length, windows.seed
        check_length(self.model, length)
        wanted = self.processing_class is not None and windows.text.add_special_tokens
        special = special_tokens(self.processing_class, self.model, wanted)
        write = partial(
            own_text,
            self.model,
            samples,
            length,
            seed,
            begins=special.before,
            processes=self.writing.processes,
            progress=self.progress,
        )
        described = {"samples": samples, "length": length, "seed": seed, "begins": special.before}
        kept = self.writing.kept
        ids = write() if kept is None else kept.read_or_write(described, write)
        protocol = f"{samples} windows of {length} tokens sampled from the model at temperature 1, seed {seed}"
        return Drawn(rows_of(ids, special.unpredicted), OWN_TEXT, protocol)


def open_rows(source: Any, part: Part, seed: int) -> Source | None:
    """The source as rows; None if it is batches already."""
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, Path)):
        source = str(source)
        if source == PYDOC:
            name = f"pydoc ({part} part): the Python manual's topics"
            return Source(text_rows([manual_text(part)]), name, is_plain=True, is_whole=True)
        return open_source(source, part, seed)
    if is_dataset(source):
        known = getattr(source.info, "dataset_name", None)
        # Columns as plain Python, whatever a user reads them as; a transform of the user's own stays.
        stored = getattr(source, "format", {"type": "a stream's"}) or {}
        if stored.get("type") not in (None, "custom"):
            source = source.with_format(None)
        return seeded(source, seed, f"a Dataset ({known})" if known else "a Dataset")
    if isinstance(source, Sequence) and source:
        if not isinstance(source[0], Mapping):
            return Source(text_rows(source), f"{len(source)} texts", is_plain=True)
        # Whatever else is in it, what has a tensor of rows is a batch.
        is_batch = any(isinstance(value, torch.Tensor) and value.ndim >= 2 for value in source[0].values())
        named = [value for name, value in source[0].items() if name != "input_ids"]
        has_tensor = any(isinstance(value, torch.Tensor) for value in source[0].values())
        is_row = bool(named) and not has_tensor  # an image with its label, say
        is_row = is_row or _is_flat(source[0].get("input_ids"))  # token ids alone
        if not is_batch and (is_row or any(isinstance(value, (str, list)) for value in named)):
            return Source(rows_from(source), f"{len(source)} rows")
    if not isinstance(source, Iterable):
        raise ValueError(
            f"calibration and evaluation take a name, a path, texts, a Dataset or batches, got {type(source).__name__}."
        )
    return None


def _is_flat(ids: Any) -> bool:
    """Whether they are one row of token ids, in a list."""
    return isinstance(ids, (list, tuple)) and bool(ids) and isinstance(ids[0], int)


def _is_chats(opened: Any, text: TextOptions) -> bool:
    return isinstance(opened, Source) and not is_tokenised(opened.rows) and holds_chats(opened, text)


def _check_chats(opened: Sequence[Any], text: TextOptions) -> None:
    """Raise ValueError unless one of the sources holds chats."""
    if any(_is_chats(one, text) for one in opened):
        return
    raise ValueError(
        "assistant_only_loss=True (--assistant-only-loss on) is for chats, a column of messages or a prompt and a "
        f"completion; {' and '.join(map(_holding, opened))}."
    )


def _holding(opened: Any) -> str:
    """What a source that is no chats holds."""
    if _is_self(opened):
        return "the model's own text is none"
    if not isinstance(opened, Source):
        return "batches have their labels already"
    return f"{opened.name} holds {'token ids' if is_tokenised(opened.rows) else 'texts'}"


def _tokenised(opened: Source, windows: WindowSpec) -> Drawn:
    """Rows of a dataset that has `input_ids`: shuffled, and neither cut nor joined."""
    assert not isinstance(opened.rows, list), "plain texts are not tokenised"
    there = columns_of(opened.rows)
    keep = [name for name in ("input_ids", "attention_mask", "labels", "token_type_ids", *_COUNTS) if name in there]
    if packed := [name for name in ("position_ids", "seq_lengths") if name in there]:
        logger.warning(
            "%s has %s, as packed rows do, which is not read: each row is one text, as windows of plain text are",
            opened.name,
            " and ".join(packed),
        )
    rows, order = shuffled(opened, windows.seed)
    drawn = list(islice(rows, windows.drawn.start, windows.drawn.stop))
    if drawn:
        check_named_in_row(drawn[0], keep, opened.name)
    held = [{name: tensor_of(name, row[name]) for name in keep} for row in drawn]
    for row in held:
        check_one_length(row, keep)
    taken = [_with_labels(row) for row in held]
    if (odd := next((row["input_ids"] for row in taken if row["input_ids"].ndim != 1), None)) is not None:
        raise ValueError(
            f"{opened.name}: input_ids of a row are a list of tokens, and these have the shape {list(odd.shape)}: "
            "leave out return_tensors where rows are tokenised (dataset.map)."
        )
    if len(taken) < windows.samples and not windows.held_out and not (windows.at_most and taken):
        raise ValueError(f"{opened.name} holds {len(taken)} tokenised rows and {windows.samples} were asked for.")
    if "attention_mask" not in there:
        _warn_of_runs(taken, opened.name)
    taken = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in taken]
    protocol = f"{len(taken)} tokenised rows, {order}{windows.words}"
    if all(row["labels"].ndim == 1 for row in taken if "labels" in row):  # one label each is an error of its own
        protocol += silent_rows(taken, opened.name, "rows")
    return Drawn(taken, opened.name, protocol, opened.dataset_id)


def _warn_of_runs(rows: Sequence[dict[str, torch.Tensor]], name: str) -> None:
    """Rows that end, or begin, with one token again and again, as padded ones do, which no mask tells from text."""
    edges = ((row["input_ids"][-_RUN:], row["input_ids"][:_RUN]) for row in rows if len(row["input_ids"]) > _RUN)
    runs = Counter(token for both in edges for token in {int(ids[0]) for ids in both if bool((ids == ids[0]).all())})
    token, count = max(runs.items(), key=lambda one: one[1], default=(0, 0))
    if 2 * count > len(rows):
        logger.warning(
            "%d of %d rows of %s end or begin with a run of the token %d, as padding does, and have no attention_mask: "
            "it counts as text. Keep the attention_mask where rows are tokenised, or do not pad them",
            count,
            len(rows),
            name,
            token,
        )


def _with_labels(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A row whose labels are those tokens alone that count in training: TRL has masks of them."""
    counts = [row.pop(name) for name in _COUNTS if name in row]
    if not counts:
        return row
    labels = row.get("labels", row["input_ids"])
    return row | {"labels": labels.masked_fill(~torch.stack(counts).bool().all(0), IGNORED)}


def window_length(wanted: int | None, model: PreTrainedModel) -> int:
    """Tokens in a window: as many as were asked for; by default 512, or as many as the model reads of a text."""
    if wanted is not None:
        return wanted
    return min(DEFAULT_LENGTH, longest_text(model) or DEFAULT_LENGTH, embedded_tokens(model) or DEFAULT_LENGTH)


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raise ValueError where a model has too few positions."""
    longest = longest_text(model)
    if longest is not None and length > longest:
        raise ValueError(
            f"sequence_length={length} is more than the {longest} positions of {type(model).__name__}; pass "
            f"sequence_length={longest}, or rows of that many tokens at most."
        )
