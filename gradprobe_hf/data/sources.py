"""Sources: a file, folder, Hub dataset or list of strings -> an iterator of documents.

Small sources are read whole; large ones are streamed through `datasets` with a seeded shuffle buffer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

# `datasets` imports pandas and pyarrow, 90 MB of memory: it is imported where a file or a dataset is opened.
if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

STREAMED_FROM_BYTES = 256 * 2**20
SHUFFLE_BUFFER = 10_000
FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# In order of preference: with two splits or more, calibration and evaluation read different ones.
SPLITS = {"calibration": ("train", "validation", "test"), "evaluation": ("test", "validation", "train")}

Rows: TypeAlias = "Dataset | IterableDataset | list[str]"


@dataclass(frozen=True)
class Source:
    """Rows of a dataset, or plain texts, and their name in a report."""

    rows: Rows
    name: str
    dataset_id: str | None = None


def open_source(spec: str, part: str, seed: int) -> Source:
    """Open a path (file or folder of .txt, .jsonl, .parquet) or a Hub dataset `id[:config[:split]]`.

    Raises:
        ValueError: no such file, or a format that is not supported.
        OSError: no such dataset, or the Hub cannot be reached.
    """
    path = Path(spec)
    if path.exists():
        return _local(path, seed)
    if (
        spec.startswith((".", "/", "~"))
        or path.suffix in FORMATS
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[^:]+){0,2}", spec)
    ):
        raise ValueError(
            f"no such file or folder: {spec!r}. Text is named by a path (.txt, .jsonl, .parquet or a folder of them), "
            "a Hub dataset 'id', 'id:config' or 'id:config:split', 'pydoc', or 'self'."
        )
    return _from_hub(spec, part, seed)


def texts_of(rows: Rows) -> Iterator[str]:
    """The documents of a dataset: its `text` column, or its only column of strings. Plain texts are documents."""
    if isinstance(rows, list):
        return (text for text in rows if text)
    column = _text_column(rows)
    return (row[column] for row in rows if row[column])


def is_tokenised(rows: Rows) -> bool:
    """Whether rows hold token ids already."""
    return not isinstance(rows, list) and "input_ids" in (rows.column_names or [])


def is_dataset(source: Any) -> bool:
    """Whether it is a `datasets.Dataset`, streamed or not."""
    # Who has one has imported the library; asking `sys.modules` spares everybody else the import.
    library = sys.modules.get("datasets")
    return library is not None and isinstance(source, (library.Dataset, library.IterableDataset))


def is_streamed(rows: Rows) -> bool:
    return is_dataset(rows) and isinstance(rows, sys.modules["datasets"].IterableDataset)


def text_rows(texts: Iterable[str]) -> list[str]:
    """A list of texts as rows.

    Raises:
        ValueError: an element that is not a string.
    """
    texts = list(texts)
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise ValueError(f"a list of texts must hold strings, got {type(wrong).__name__}.")
    return texts


def _local(path: Path, seed: int) -> Source:
    files = sorted(p for p in path.rglob("*") if p.suffix in FORMATS) if path.is_dir() else [path]
    kinds = {FORMATS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({file.suffix or file.name for file in files})) or "no such files"
        raise ValueError(f"{path} must be .txt, .jsonl or .parquet, or a folder of one of them; it holds {found}.")
    kind, size = str(kinds.pop()), sum(file.stat().st_size for file in files)
    if not size:
        raise ValueError(f"{path} is empty.")
    streaming = size >= STREAMED_FROM_BYTES
    # A whole file is one document, so its line breaks reach the tokenizer. A stream comes line by line: they are kept.
    options: dict[str, Any] = {}
    if kind == "text":
        options = {"sample_by": "line", "keep_linebreaks": True} if streaming else {"sample_by": "document"}
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    names = [str(file) for file in files]
    try:
        rows = load_dataset(kind, data_files=names, split="train", streaming=streaming, **options)
    except (DatasetsError, ValueError, StopIteration) as error:  # the last two from files without a row
        raise ValueError(f"{path} cannot be read as {kind}: {error.__cause__ or error}") from error
    return Source(_shuffled(rows, seed) if streaming else rows, path.name)


def _from_hub(spec: str, part: str, seed: int) -> Source:
    from datasets import get_dataset_split_names, load_dataset, load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    dataset_id, config, split = [*spec.split(":"), None, None][:3]
    try:
        builder = load_dataset_builder(dataset_id, config)
        if split is None:
            offered = get_dataset_split_names(dataset_id, config)
            split = next((name for name in SPLITS[part] if name in offered), offered[0])
        streaming = (builder.info.dataset_size or STREAMED_FROM_BYTES) >= STREAMED_FROM_BYTES
        rows = load_dataset(dataset_id, config, split=split, streaming=streaming)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise OSError(
            f"cannot load the dataset {dataset_id!r} from the Hub: {error} Check the name, your network and "
            "HF_HUB_OFFLINE; gated data needs `hf auth login`. 'pydoc' and local files need no network."
        ) from error
    name = ":".join(filter(None, (dataset_id, config, split)))
    return Source(_shuffled(rows, seed) if streaming else rows, name, dataset_id)


def _shuffled(rows: IterableDataset, seed: int) -> IterableDataset:
    return rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)


def _text_column(rows: Dataset | IterableDataset) -> str:
    first = next(iter(rows), None)
    if first is None:
        raise ValueError("the dataset is empty.")
    if isinstance(first.get("text"), str):
        return "text"
    strings = [name for name, value in first.items() if isinstance(value, str)]
    if len(strings) != 1:
        raise ValueError(
            f"the dataset has no 'text' column; its columns are {', '.join(first)}. Rename the one to use."
        )
    return strings[0]
