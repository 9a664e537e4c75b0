"""Sources: a file, folder, Hub dataset or list of strings -> an iterator of documents.

Small sources are read whole; large ones are streamed: rows through `datasets` with a seeded shuffle buffer, text files
in pieces of whole lines.
"""

from __future__ import annotations

import glob
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from gradprobe_hf.data.text.text_options import PYDOC, SELF
from gradprobe_hf.runtime.paths import looks_like_path

# `datasets` imports pandas and pyarrow, 90 MB of memory: it is imported where a file or a dataset is opened.
if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

STREAMED_FROM_BYTES = 256 * 2**20
SHUFFLE_BUFFER = 10_000
PIECE_BYTES = 2**18  # of what is too large to read whole: of a text a document, of a table rows that stay together
WORDS_OF_A_TEXT = 6  # columns have shorter names
WORDS_OF_A_NAME = 2  # at most, in a first line that a semicolon, say, parts into names

# A file's ending -> the loader of `datasets`, and its options. "NA" is a text like any other; and tabs need no quotes,
# so that a quotation mark in a .tsv is one (3: csv.QUOTE_NONE), and does not swallow the rows up to the next.
_CSV = {"keep_default_na": False}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {}),
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".parquet": ("parquet", {}),
    ".csv": ("csv", _CSV),
    ".tsv": ("csv", {**_CSV, "sep": "\t", "quoting": 3}),
}
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
SEPARATORS = (",", ";", "\t", "|")
NAMED = ".txt, .jsonl, .parquet, .csv or .tsv"
# Endings of files, not of data sets: who names one means a path.
_FILE_ENDING = re.compile(
    r"\.(\w*[a-z]\w*\.)?(docx?|pdf|md|rst|html?|xlsx?|xml|ya?ml|arrow|zip|gz|zst|bz2|xz|tar|log|py|pt|bin)"
)
_OF_A_SAVED_DATASET = ("state.json", "dataset_dict.json")
_OF_A_MODEL = ("config.json", "adapter_config.json")  # whose vocabulary or figures are no texts or images to learn from
# In order of preference: with two splits or more, calibration and evaluation read different ones.
SPLITS = {"calibration": ("train", "validation", "test"), "evaluation": ("test", "validation", "train")}
# What files and folders of a split are called, between what is no letter, as `datasets` has it: train.jsonl,
# test-00000-of-00002.parquet, data_train.jsonl. `datasets` minds capitals, and we do not.
_SPLIT_NAMES = {
    "training": "train",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
_SPLITS = "|".join({*SPLITS["calibration"], *_SPLIT_NAMES})
_OF_A_SPLIT = re.compile(rf"(?:.*[-._ \d])?({_SPLITS})(?:[-._ \d].*)?", re.IGNORECASE)

Rows: TypeAlias = "Dataset | IterableDataset | list[str]"


@dataclass(frozen=True)
class Source:
    """Rows of a dataset, or plain texts, and their name in a report.

    Attributes:
        is_plain: whether it is text without columns: a list of texts, or .txt files.
        split: which of several splits was chosen; None: there is one, or it was named.
        in_order: the rows of a stream that stand together one after the other; None: `rows` are.
        is_whole: whether it is one long text, of which windows are cut whatever is done with documents.
    """

    rows: Rows
    name: str
    dataset_id: str | None = None
    is_plain: bool = False
    split: str | None = None
    in_order: IterableDataset | None = None
    is_whole: bool = False

    @cached_property
    def first_row(self) -> Any:
        """The first row, which tells what the columns hold; None: there is none.

        Kept, and of a stream before it is shuffled: its buffer is filled anew for each reader.
        """
        return next(iter(self.beginning), None)

    @property
    def beginning(self) -> Rows:
        """The rows, for what looks at the first ones alone."""
        return self.rows if self.in_order is None else self.in_order


def class_names(rows: Any, column: str | None) -> tuple[str, ...]:
    """What a data set calls the classes of a column (`datasets.ClassLabel`), of rows or of words; none of any other."""
    feature = (getattr(rows, "features", None) or {}).get(column)
    feature = getattr(feature, "feature", feature)
    return tuple(getattr(feature, "names", None) or ())


def at_rate(opened: Source, rate: int) -> Source:
    """The source with its columns of recordings (`datasets.Audio`) decoded at this rate, as pipelines do."""
    from datasets import Audio

    rows: Any = opened.rows
    for name, feature in (getattr(rows, "features", None) or {}).items():
        if isinstance(feature, Audio) and feature.sampling_rate != rate:
            rows = rows.cast_column(name, replace(feature, sampling_rate=rate))
    return opened if rows is opened.rows else replace(opened, rows=rows)


_AT_ONCE = 2**20  # characters, of a file that is looked through
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")  # files in a folder, which are not read there


def open_source(spec: str, part: str, seed: int) -> Source:
    """Open a path (a file or a folder of one kind) or a Hub dataset `id[:config[:split]]`.

    Raises:
        ValueError: no such file, or a format that is not supported.
        OSError: no such dataset, or the Hub cannot be reached.
    """
    if not spec.strip():
        raise ValueError(f"a text to calibrate or measure on is named by {spec!r}, which is empty. {_WHAT_NAMES_TEXT}")
    path = Path(spec).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in _OF_A_MODEL):
        raise ValueError(f"{path} is the folder of a model, which is no text. {_WHAT_NAMES_TEXT}")
    if path.is_dir() and any(file.suffix.lower() in IMAGES for file in path.rglob("*")):
        return _images(path, part)
    if path.exists():
        return _local(path, part, seed)
    if is_path(spec) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[^:]+){0,2}", spec):
        raise ValueError(f"no such file or folder: {spec!r}. {_WHAT_NAMES_TEXT}")
    return _from_hub(spec, part, seed)


_WHAT_NAMES_TEXT = (
    f"Text is named by a path ({NAMED}, or a folder of one of them), a Hub dataset 'id', 'id:config' or "
    "'id:config:split', 'pydoc', or 'self'."
)


def is_path(spec: str) -> bool:
    """Whether it is meant as one, though nothing is there: then the Hub is not asked."""
    path = Path(spec)
    beside = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    known = path.suffix.lower() in FORMATS or _FILE_ENDING.fullmatch(path.suffix.lower()) is not None
    return looks_like_path(spec) or known or beside


def is_plain_text(source: Any) -> bool:
    """Whether it can only be text: a file or a dataset may hold token ids all the same."""
    if isinstance(source, (str, Path)):
        return str(source) in (PYDOC, SELF) or str(source).endswith(".txt")
    return isinstance(source, (list, tuple)) and bool(source) and isinstance(source[0], str)


def is_dataset(source: Any) -> bool:
    """Whether it is a `datasets.Dataset`, streamed or not."""
    # Who has one has imported the library; asking `sys.modules` spares everybody else the import.
    library = sys.modules.get("datasets")
    return library is not None and isinstance(source, (library.Dataset, library.IterableDataset))


def is_streamed(rows: Rows) -> bool:
    return is_dataset(rows) and isinstance(rows, sys.modules["datasets"].IterableDataset)


def shuffled(opened: Source, seed: int) -> tuple[Dataset | IterableDataset, str]:
    """Rows in an order that a seed draws, and what a protocol says of it: of a stream only so many are mixed at a time.

    What was opened here as a stream is shuffled already, with the seed that it was opened with.
    """
    rows: Any = opened.rows
    assert not isinstance(rows, list), "plain texts are not rows"
    if not is_streamed(rows):
        return rows.shuffle(seed=seed), f"shuffled with seed {seed}"
    if opened.in_order is None:
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return rows, f"drawn with seed {seed} from {SHUFFLE_BUFFER:,} rows at a time of a stream"


def order_of_parts(rows: Rows, seed: int) -> Iterator[int] | None:
    """Numbers of rows of a data set that is too large to read whole; None of any other, and of a stream.

    Those of `PIECE_BYTES` stand together, as they do in the data set, and such parts come in a seeded order.
    """
    if not is_dataset(rows) or is_streamed(rows):
        return None
    data: Any = rows
    # Rows that were selected are numbers of those in the table.
    size = data.data.nbytes * len(data) // max(1, data.data.num_rows)
    if size < STREAMED_FROM_BYTES:
        return None
    many = max(1, len(data) * PIECE_BYTES // size)
    order = torch.randperm(-(-len(data) // many), generator=torch.Generator().manual_seed(seed)).tolist()
    return (number for part in order for number in range(part * many, min(len(data), (part + 1) * many)))


def is_tokenised(rows: Rows) -> bool:
    """Whether rows hold token ids already."""
    return not isinstance(rows, list) and "input_ids" in columns_of(rows)


def columns_of(rows: Dataset | IterableDataset) -> list[str]:
    """The names of columns that rows have as they are read.

    A stream that was mapped does not know them, and a transform of the user's (`set_transform`) makes others of those
    that are stored: then they are those of the first row.
    """
    is_transformed = getattr(rows, "format", {}).get("type") == "custom"  # a stream has no format
    return list(next(iter(rows), {}) if is_transformed or rows.column_names is None else rows.column_names)


def text_rows(texts: Iterable[str]) -> list[str]:
    """A list of texts as rows.

    Raises:
        ValueError: an element that is not a string.
    """
    texts = list(texts)
    for text in texts:
        if isinstance(text, list) and text and isinstance(text[0], Mapping):
            raise ValueError(
                "a list of texts must hold strings, got lists of messages: give chats as rows, [{'messages': [...]}, "
                "...]."
            )
        if not isinstance(text, str):
            raise ValueError(
                f"a list of texts must hold strings, got {type(text).__name__}; a list of batches must hold dicts of "
                "tensors."
            )
    return texts


def rows_from(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """A list of rows, dicts of texts or messages, as a dataset.

    Raises:
        ValueError: rows of unlike types.
    """
    from datasets import Dataset
    from pyarrow.lib import ArrowException

    try:
        # Of all rows: `from_list` alone takes the names of the first one, and tools of a later chat would be lost.
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: _alike([row.get(name) for row in rows]) for name in names}
        return Dataset.from_dict(columns)
    except (ArrowException, TypeError, ValueError) as error:
        raise ValueError(f"a list of rows must hold dicts of the same names and types: {error}") from error


def _alike(values: list[Any]) -> list[Any]:
    """A column of chats with the content of every message in parts, where that of any is: a column has one type."""
    in_parts = any(isinstance(one.get("content"), list) for value in values for one in _messages(value))
    return [[_in_parts(one) for one in _messages(value)] or value for value in values] if in_parts else values


def _messages(value: Any) -> list[Mapping[str, Any]]:
    """Those of a chat; none of anything else."""
    is_chat = isinstance(value, list) and all(isinstance(one, Mapping) for one in value)
    return value if is_chat else []


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _images(path: Path, part: str) -> Source:
    """Images in a folder for each class, below `train` and `test` if there are any, as `datasets` reads them."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        splits = load_dataset("imagefolder", data_dir=str(path))
    except (DatasetsError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as a folder of images, with a folder for each class: {error} Give one that holds "
            "nothing else, or a folder or file of text."
        ) from error
    name = next((name for name in SPLITS[part] if name in splits), next(iter(splits)))
    return Source(splits[name], path.name, split=name if len(splits) > 1 else None)


def _local(path: Path, part: str, seed: int) -> Source:
    if path.is_dir() and any((path / name).is_file() for name in _OF_A_SAVED_DATASET):
        raise ValueError(
            f"{path} is a data set that was saved by save_to_disk: give datasets.load_from_disk({str(path)!r}), or its "
            "rows in a file (.to_parquet)."
        )
    files, split = _of_split(path, _files(path), part) if path.is_dir() else ([path], None)
    endings = {file.suffix.lower() for file in files}
    if len(endings & set(FORMATS)) != 1 or len(endings) != 1:
        found = ", ".join(sorted({file.suffix or file.name for file in files})) or "no such files"
        raise ValueError(f"{path} must be {NAMED}, or a folder of one of them; it holds {found}.")
    kind, options = FORMATS[endings.pop()]
    size = sum(file.stat().st_size for file in files)
    if not size:
        raise ValueError(f"{path} is empty.")
    streaming = size >= STREAMED_FROM_BYTES
    if kind == "text":
        if streaming:
            return Source(_pieces(path, files, seed), path.name, is_plain=True, split=split)
        # A whole file is one, so its line breaks reach the tokenizer; the mark of its encoding does not.
        options = {"sample_by": "document", "encoding": "utf-8-sig"}
    if kind == "json" and not streaming:
        _check_encoding(path, files)
    rows = _loaded(path, kind, [str(file) for file in files], streaming, options)
    if kind == "csv":
        _check_separator(path, rows.column_names or [], options.get("sep", ","))
    if kind == "csv" and "__index_level_0__" in (rows.column_names or []):  # pandas takes what is too much for an index
        raise ValueError(
            f"{path} has rows with more fields than its first line has names: put texts that hold the separator into "
            "quotes, and no separator at the end of a row."
        )
    if kind == "csv":
        _warn_of_texts_as_names(path, rows.column_names or [])
    return seeded(rows, seed, path.name, is_plain=kind == "text", split=split)


def _check_encoding(path: Path, files: Sequence[Path]) -> None:
    """Raise ValueError for JSON that is no UTF-8: its texts would be read until one of them is looked at."""
    for file in files:
        try:
            with file.open(encoding="utf-8") as opened:
                while opened.read(_AT_ONCE):
                    pass
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} cannot be read as json: {error}. Save it as UTF-8.") from error


def _check_separator(path: Path, names: list[str], separator: str) -> None:
    """Raise ValueError where several columns are read as one: numbers beside a text would be part of it."""
    names = [name for name in names if name != "__index_level_0__"]
    for other in (one for one in SEPARATORS if one != separator):
        parts = names[0].split(other) if len(names) == 1 else []
        if len(parts) > 1 and all(0 < len(part.split()) <= WORDS_OF_A_NAME for part in parts):
            raise ValueError(
                f"{path} has {other!r} between the names of its columns, {names[0]!r}, and fields are told apart by "
                f"{separator!r} there: save it with commas as .csv, or with tabs as .tsv."
            )


def _files(folder: Path) -> list[Path]:
    """Those that can be read; what is hidden (`.ipynb_checkpoints`, say) holds older copies."""
    inside = [
        path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    packed = [
        path
        for path in inside
        if path.suffix.lower() in _PACKED
        and Path(path.stem).suffix.lower() in FORMATS
        and path.with_suffix("") not in inside  # nor unpacked beside it
    ]
    if packed:
        raise ValueError(
            f"{folder} holds {min(packed).name}, which is compressed and would be left out: unpack such files, or name "
            "the files to read."
        )
    return sorted(path for path in inside if path.suffix.lower() in FORMATS)


def _of_split(folder: Path, files: list[Path], part: str) -> tuple[list[Path], str | None]:
    """Of a folder that has its splits in files or folders of their names those of the one to read, and that name; of
    others all files.

    Raises:
        ValueError: some files are named after splits, and some are not.
    """
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        inside = file.relative_to(folder)
        found = next(filter(None, map(_OF_A_SPLIT.fullmatch, (*inside.parts[:-1], inside.stem))), None)
        name = found and found[1].lower()
        splits.setdefault(name and _SPLIT_NAMES.get(name, name), []).append(file)
    named = [name for name in SPLITS[part] if name in splits]
    if len(named) < 2:
        return files, None
    if None in splits:
        raise ValueError(
            f"{folder} holds {splits[named[0]][0].name} and {splits[named[1]][0].name}, which are splits, beside "
            f"{splits[None][0].name}, of which nobody knows: name the file to read."
        )
    logger.info("%s: %s is read of the splits %s", folder, named[0], ", ".join(named))
    return splits[named[0]], named[0]


def _pieces(path: Path, files: list[Path], seed: int) -> IterableDataset:
    """Large files of text as pieces of whole lines, in a seeded order; each is read when it is its turn.

    Single lines in that order would be text that nobody writes: a window would hold the lines of many places.
    """
    from datasets import Features, IterableDataset, Value

    places = [(file, start) for file in files for start in range(0, file.stat().st_size, PIECE_BYTES)]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()

    def read() -> Iterator[dict[str, str]]:
        for number in order:
            if text := _piece(path, *places[number]):
                yield {"text": text}

    return IterableDataset.from_generator(read, features=Features({"text": Value("string")}))


def _piece(path: Path, file: Path, start: int) -> str:
    """The lines of a file that begin in the `PIECE_BYTES` from `start` on."""
    with open(file, "rb") as opened:
        if start:
            opened.seek(start - 1)
            opened.readline()  # what began before; nothing but its end, where a line begins at `start`
        lines = []
        while opened.tell() < start + PIECE_BYTES and (line := opened.readline()):
            lines.append(line)
    try:
        return b"".join(lines).decode("utf-8" if start else "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read as text: {error}. Save it as UTF-8.") from error


def _warn_of_texts_as_names(path: Path, names: Sequence[str]) -> None:
    """A file of texts without a line of names loses its first text to them."""
    longest = max(names, key=len, default="")
    if len(longest.split()) >= WORDS_OF_A_TEXT:
        shown = longest if len(longest) <= 60 else f"{longest[:57]}..."
        logger.warning(
            "%s: its first line is read as the names of its columns, %r among them. If that is a text, put a line of "
            "names above it",
            path,
            shown,
        )


def _loaded(path: Path, kind: str, files: list[str], streaming: bool, options: dict[str, Any]) -> Any:
    """What `datasets` makes of files; whatever it cannot read is an error that names them."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from pyarrow.lib import ArrowException  # of rows whose types differ, some are a TypeError or a NotImplementedError

    own = logging.getLogger("datasets")
    level = own.level
    own.setLevel(logging.CRITICAL)  # it logs a traceback of its own before it raises
    try:
        named = [glob.escape(file) for file in files]  # it reads brackets and stars as patterns
        rows = load_dataset(kind, data_files=named, split="train", streaming=streaming, **options)
    except (DatasetsError, ArrowException, ValueError, TypeError, StopIteration) as error:
        # ValueError and StopIteration come from files without a row.
        cause = error.__cause__ or error
        if "corresponds to no data" in str(cause):
            raise ValueError(f"{path} is empty: it holds no rows.") from error
        remedy = "Every row must have the same columns, of the same types."
        if isinstance(cause, UnicodeDecodeError):
            remedy = "Save it as UTF-8."
        raise ValueError(f"{path} cannot be read as {kind}: {str(cause).rstrip('.')}. {remedy}") from error
    finally:
        own.setLevel(level)
    return rows


def _from_hub(spec: str, part: str, seed: int) -> Source:
    from datasets import get_dataset_split_names, load_dataset, load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    dataset_id, config, split = [*spec.split(":"), None, None][:3]
    chosen = None
    try:
        builder = load_dataset_builder(dataset_id, config)
        if split is None:
            offered = get_dataset_split_names(dataset_id, config)
            split = next((name for name in SPLITS[part] if name in offered), offered[0])
            chosen = split if len(offered) > 1 else None
        streaming = (builder.info.dataset_size or STREAMED_FROM_BYTES) >= STREAMED_FROM_BYTES
        rows = load_dataset(dataset_id, config, split=split, streaming=streaming)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise OSError(
            f"cannot load the dataset {dataset_id!r} from the Hub: {error} Check the name, your network and "
            "HF_HUB_OFFLINE; gated data needs `hf auth login`. 'pydoc' and local files need no network."
        ) from error
    name = ":".join(filter(None, (dataset_id, config, split)))
    return seeded(rows, seed, name, dataset_id=dataset_id, split=chosen)


def seeded(rows: Rows, seed: int, name: str, **described: Any) -> Source:
    """Rows as they are; those of a stream shuffled with the seed, and in order where its files are shuffled alone."""
    if isinstance(rows, list) or not is_streamed(rows):
        return Source(rows, name, **described)
    shuffled, in_order = (rows.shuffle(seed=seed, buffer_size=size) for size in (SHUFFLE_BUFFER, 1))
    return Source(shuffled, name, in_order=in_order, **described)
