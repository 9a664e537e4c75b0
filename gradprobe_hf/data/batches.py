"""Batches: what the model is called with, as often as a run needs it, and what a report says about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradprobe_hf.model.masks import unpadded
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.embeddings import embedding_inputs, is_for_embedding

PASSAGE = 32  # tokens: more than two texts have in common by chance
SHARED = 0.01  # of an evaluation text: two texts may quote the same lines
SKETCH = 512  # numbers by which a text is known again
MASKED_ALIKE = 0.5  # of the masked tokens show the mask: four of five do, others show any token, or their own
AS_GIVEN = "batches as given"
# What says which examples or tokens count, and not what they are.
BESIDE = ("labels", "attention_mask", "return_loss")
# Of a batch what says how the model is called and not with what: that is ours to say.
HOW_TO_CALL = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Batches:
    """Batches on the CPU.

    Attributes:
        items: what `model(**batch)` is called with.
        source: where they come from, for the report and the card.
        samples: sequences (rows) in all batches.
        tokens: tokens without padding; rows where there are no `input_ids`.
        protocol: how windows were cut and drawn, in words.
        dataset_id: the Hub dataset, if it is one.
        mixed_ids: the Hub datasets in a mixture.
        example: the first text, where a template has rendered it.
    """

    items: tuple[dict[str, Any], ...]
    source: str
    samples: int
    tokens: int
    protocol: str
    dataset_id: str | None = None
    example: str | None = None
    mixed_ids: tuple[str, ...] = ()

    @classmethod
    def none(cls) -> Batches:
        """The batches of a run that reads no text: empty, and false in a condition."""
        return cls((), "none", 0, 0, "no text")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def longest(self) -> int:
        """Tokens in the longest row (1 where rows have none)."""
        ids = [item["input_ids"] for item in self.items if isinstance(item.get("input_ids"), Tensor)]
        return max((rows.shape[1] for rows in ids), default=1)

    def in_batches_of(self, size: int) -> Batches:
        """The same rows, at most `size` at a time, in the same order.

        Only those that lie next to each other and are padded to one length are stacked, and what belongs to no row by
        its position, patches of all images in one tensor say, stays in one batch.
        """
        items = list[dict[str, Any]]()
        for _, alike in groupby(self.items, _row_shapes):
            same = list(alike)
            if _row_shapes(same[0]) is None:
                items += same
                continue
            rows = {name: torch.cat([item[name] for item in same]).split(size) for name in same[0]}
            items += [dict(zip(rows, parts, strict=True)) for parts in zip(*rows.values(), strict=True)]
        return replace(self, items=tuple(items))

    def halves(self, seed: int) -> tuple[Batches, Batches]:
        """Two parts without a row in common, drawn by the seed: one to choose by, one to report on.

        Rows are dealt out; where it cannot be told which they are, whole batches.

        Raises:
            ValueError: there are no two of them.
        """
        return self.split(seed, 1 / 2, "at least two rows: evaluation_samples (--evaluation-samples)")

    def split(self, seed: int, share: float, remedy: str = "at least two rows") -> tuple[Batches, Batches]:
        """A share of the rows, at least one, drawn by the seed, and the others.

        Args:
            remedy: what to give where there are no two parts.

        Raises:
            ValueError: there are not.
        """
        parts = self.in_batches_of(1).items
        if len(parts) < 2:
            raise ValueError(
                f"{self.source} has {self.samples} row in {len(self)} batch, of which no two parts can be made. Give "
                f"{remedy}, or two batches."
            )
        drawn = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
        count = max(1, int(share * len(parts)))
        what = "half" if share == 1 / 2 else "part"
        words = (f"a {what} of it drawn with seed {seed}", f"the {what} of it that seed {seed} has not drawn")
        return self._part(parts, drawn[:count], words[0]), self._part(parts, drawn[count:], words[1])

    def _part(self, parts: tuple[dict[str, Any], ...], drawn: list[int], words: str) -> Batches:
        items = tuple(parts[index] for index in sorted(drawn))
        found = replace(
            self,
            items=items,
            samples=sum(map(row_count, items)),
            tokens=sum(map(token_count, items)),
            protocol=f"{self.protocol}; {words}",
        )
        return found.in_batches_of(max(map(row_count, self.items)))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the values; for rows of one length it does not depend on how they are batched."""
        # All batches of one name before the next name: their bytes are those of all rows, however these are batched.
        # Viewed as bytes because NumPy has no bfloat16.
        # Embeddings as labels are the model's, and other bits on another device.
        items = [embedding_inputs(batch) if is_for_embedding(batch) else batch for batch in self.items]
        names = sorted({name for batch in items for name in batch})
        digest = hashlib.sha256()
        for name in names:
            for batch in items:
                for part in _parts(batch.get(name)):
                    digest.update(part)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What a report says about them, in JSON types."""
        return {
            "source": self.source,
            "samples": self.samples,
            "tokens": self.tokens,
            "protocol": self.protocol,
            "dataset_id": self.dataset_id,
            "fingerprint": self.fingerprint,
            **({"mixed_ids": list(self.mixed_ids)} if self.mixed_ids else {}),
            **({"example": self.example} if self.example is not None else {}),
        }


def _row_shapes(item: Mapping[str, Any]) -> list[tuple[str, torch.Size, torch.dtype]] | None:
    """Of each tensor of a batch what one row has of it; None where it cannot be told which rows these are."""
    if not all(isinstance(value, Tensor) and value.ndim for value in item.values()):
        return None
    if len({len(value) for value in item.values()}) != 1:
        return None
    return [(name, value.shape[1:], value.dtype) for name, value in item.items()]


def shared_rows(a: Batches, b: Batches) -> int:
    """How many rows of tokens, images or recordings are in both: nothing should be calibrated and evaluated on."""
    return len(_digests(a) & _digests(b))


def _digests(batches: Batches) -> set[bytes]:
    """Of the contents, for those of images are large."""
    return {hashlib.sha256(content).digest() for content, _ in _rows(batches) if content}


def _rows(batches: Batches) -> Iterator[tuple[bytes, int]]:
    """The content of each row without its padding, which the other rows bring, and its tokens; 0 of what is no text.

    Of a text beside an image both: "a photo of a cat" may be said of many.
    """
    for batch in batches:
        ids = _text_of(batch)
        values = _input_of(batch) if ids is None else ids
        mask, beside = _mask_of(batch, values), None if ids is None else _beside_text(batch, len(values))
        for number, row in enumerate(values):
            if mask is not None:
                row = row[mask[number]]
            content = _bytes(row) + (b"" if beside is None else _bytes(beside[number]))
            yield content, 0 if ids is None else len(row)


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _beside_text(batch: Mapping[str, Any], rows: int) -> Tensor | None:
    """The image or recording of each row, `[rows, ...]`; None: there are none, or which row has which is not known."""
    media = (value for name, value in batch.items() if name.startswith(("pixel_values", "input_features")))
    found = next((value for value in media if isinstance(value, Tensor) and value.is_floating_point()), None)
    if found is None or len(found) == rows:
        return found
    return found[None] if rows == 1 else None  # the patches of its images


def _input_of(batch: Mapping[str, Any]) -> Tensor:
    """The first tensor that a model sees: labels are alike in many rows."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return next((value for name, value in tensors.items() if name not in BESIDE), next(iter(tensors.values())))


def _text_of(batch: Mapping[str, Any]) -> Any:
    """The token ids; of masked ones those that were there, which the labels say: they are masked anew in every batch.

    Masked ones are told by the token that most of those with a label show. Labels of words, and of another text that is
    to be written, say nothing of what is read.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or labels.shape != ids.shape:
        return ids
    if labels.is_floating_point():  # embeddings, of as many numbers as there are tokens
        return ids
    counted = labels != IGNORED
    shown = ids[counted]
    if not len(shown) or float((shown == shown.mode().values).float().mean()) < MASKED_ALIKE:
        return ids
    return torch.where(counted, labels.to(ids), ids)


def shared_passages(a: Batches, b: Batches) -> float:
    """The share of the runs of `PASSAGE` tokens in b that stand in a, too, wherever the windows of both are cut.

    What stands in a more than once, or in b more than twice, a system prompt say, is nobody's text and does not count.
    """
    return _share_of(_passages(b), _seldom(_passages(a)))


def sketch(batches: Batches) -> list[int]:
    """Numbers by which what was read is known again, in whatever windows, beside whatever else: the smallest of those
    of its passages, which are a random sample of them (the bottom-k sketch of Cohen and Kaplan 2007).
    """
    kept: list[int] = _seldom(_numbers(batches))[:SKETCH].tolist()
    return kept


def share_in_sketch(known: Sequence[int], batches: Batches) -> float:
    """About which share of these batches is of the text that a sketch was made of."""
    numbers = _numbers(batches)
    if len(known) == SKETCH:  # what lies above was not kept
        numbers = numbers[numbers <= known[-1]]
    return _share_of(numbers, torch.tensor(known)) if known else 0.0


def _share_of(numbers: Tensor, known: Tensor) -> float:
    """Which share of them is known, without those that are there again and again: a text may be there twice."""
    counted = torch.isin(numbers, _seldom(numbers, most=2)) & torch.isin(numbers, known)
    return float(counted.double().mean()) if len(numbers) else 0.0


def _seldom(numbers: Tensor, most: int = 1) -> Tensor:
    """Those that are there so often at most, sorted."""
    values, counts = numbers.unique(return_counts=True)
    return values[counts <= most]


def _numbers(batches: Batches) -> Tensor:
    """Of passages; of rows that are shorter, or hold no text, one each."""
    short = (content for content, tokens in _rows(batches) if tokens < PASSAGE)  # pixels, not all at once
    hashed = [int.from_bytes(hashlib.sha256(one).digest()[:8], "little", signed=True) for one in short]
    return torch.cat([_passages(batches), torch.tensor(hashed, dtype=torch.long)])


def _passages(batches: Batches) -> Tensor:
    """A number for every run of `PASSAGE` tokens without padding, the same for the same tokens."""
    factors = torch.randint(2**62, (PASSAGE,), generator=torch.Generator().manual_seed(0))
    found = [torch.empty(0, dtype=torch.long)]
    for batch in batches:
        ids = _text_of(batch)
        if isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] >= PASSAGE and not ids.is_floating_point():
            numbers = (ids.long().unfold(1, PASSAGE, 1) * factors).sum(-1)  # modulo 2^64
            mask = _unpadded(batch)
            found.append(numbers.flatten() if mask is None else numbers[mask.unfold(1, PASSAGE, 1).all(-1)])
    return torch.cat(found)


def from_rows(rows: Sequence[Mapping[str, Tensor]], batch_size: int, pad_token_id: int, **described: Any) -> Batches:
    """Rows of token ids `[tokens]`; where their lengths differ, padded on the right within each batch, and masked.

    Raises:
        ValueError: labels that are not of tokens.
    """
    if any(row["labels"].ndim == 0 for row in rows if "labels" in row):
        raise ValueError(
            "rows have one label each, and for a model of this class no batches are made of such rows: give batches "
            "that it returns a loss for (a DataLoader, or a list)."
        )
    masked = any("attention_mask" in row for row in rows) or len({len(row["input_ids"]) for row in rows}) > 1
    labelled, typed = (any(name in row for row in rows) for name in ("labels", "token_type_ids"))
    fill = {"input_ids": pad_token_id, "labels": IGNORED}
    items = []
    for start in range(0, len(rows), batch_size):
        part = [_completed(row, masked, labelled, typed) for row in rows[start : start + batch_size]]
        items.append(
            {
                name: pad_sequence([row[name] for row in part], batch_first=True, padding_value=fill.get(name, 0))
                for name in part[0]
            }
        )
    tokens = sum(map(token_count, items))
    return Batches(items=tuple(items), samples=len(rows), tokens=tokens, **described)


def from_windows(windows: Tensor, batch_size: int, **described: Any) -> Batches:
    """Full windows of token ids `[samples, tokens]`: no padding, so no attention mask."""
    return from_rows([{"input_ids": window} for window in windows], batch_size, 0, **described)


def _completed(row: Mapping[str, Tensor], masked: bool, labelled: bool, typed: bool) -> dict[str, Tensor]:
    """A row with a mask, labels and types where others have them: all of it counts, and is one text."""
    mask = {"attention_mask": torch.ones_like(row["input_ids"])} if masked else {}
    labels = {"labels": row["input_ids"]} if labelled else {}
    types = {"token_type_ids": torch.zeros_like(row["input_ids"])} if typed else {}
    return {**mask, **labels, **types, **row}


def from_iterable(source: Iterable[Any], name: str) -> Batches:
    """A DataLoader or a list of batches, as they are.

    Raises:
        ValueError: it can be read only once, is empty, a DataFrame, or holds something that `model(**batch)` cannot
            take.
    """
    if isinstance(source, Iterator):
        raise ValueError(
            "calibration batches must be re-iterable, got a one-shot iterator; pass a list or a DataLoader."
        )
    if type(source).__name__ == "DataFrame":  # what it iterates over are its columns
        package = type(source).__module__.partition(".")[0]
        raise ValueError(f"a DataFrame is no list of batches: give a data set of it, Dataset.from_{package}(frame).")
    # Read once, here: a DataLoader that shuffles would give every pass, and a resumed run, other batches.
    items = []
    for batch in source:
        if not isinstance(batch, Mapping) or not any(isinstance(value, Tensor) for value in batch.values()):
            raise ValueError(
                f"a batch must be a mapping of tensors that model(**batch) accepts, got {type(batch).__name__}. Name "
                "them: {'input_ids': ..., 'attention_mask': ...}."
            )
        kept = {name: value for name, value in batch.items() if name not in HOW_TO_CALL}
        # A loader may fill one tensor again and again; those of a list are all there.
        copy = not isinstance(source, Sequence)
        items.append({k: v.detach().to("cpu", copy=copy) if isinstance(v, Tensor) else v for k, v in kept.items()})
    if not items:
        raise ValueError(f"{name} holds no batches.")
    return Batches(
        items=tuple(items),
        source=name,
        samples=sum(row_count(batch) for batch in items),
        tokens=sum(token_count(batch) for batch in items),
        protocol=AS_GIVEN,
    )


def _parts(value: Any) -> Iterator[bytes]:
    """The bytes of a value of a batch; labels may be dicts in a list, a row's boxes and classes say."""
    if isinstance(value, Tensor):
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from _parts(value[name])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _parts(one)
    elif value is not None:  # of other objects the type alone: what they print may be another in every process
        yield (repr(value) if isinstance(value, (str, int, float)) else type(value).__name__).encode()


def row_count(batch: Mapping[str, Any]) -> int:
    """Sequences (or images, or examples) in a batch: the leading dimension of its tensors."""
    if isinstance(ids := batch.get("input_ids"), Tensor):
        return ids.shape[0]
    return next(value.shape[0] for value in batch.values() if isinstance(value, Tensor))


def token_count(batch: Mapping[str, Any]) -> int:
    """Tokens without padding; rows of a batch that has no token ids."""
    ids = batch.get("input_ids")
    if ids is None:
        return row_count(batch)
    mask = _unpadded(batch)
    return ids.numel() if mask is None else int(mask.sum())


def _unpadded(batch: Mapping[str, Any]) -> Tensor | None:
    """Which tokens are no padding, bool as the ids; None: all."""
    ids = batch.get("input_ids")
    return _mask_of(batch, ids) if isinstance(ids, Tensor) else None


def _mask_of(batch: Mapping[str, Any], values: Tensor) -> Tensor | None:
    """What counts of values `[rows, ...]`; None where the batch has no mask of their shape."""
    return unpadded(batch.get("attention_mask"), values)
