"""The paper protocol: perplexity as GPTQ, SparseGPT, Wanda and those who compare with them measure it.

Their scripts join the rows of WikiText-2's raw test split with blank lines, empty rows included, tokenise that once
with whatever special tokens the tokenizer adds (Llama's: one `<s>` at the very start, none at a window's), and cut it
into consecutive windows of the model's context, 2,048 tokens; the rest is left out. Perplexity is exp of the mean over
windows of each window's mean next-token loss. Windows are equally long, so that is the mean over tokens.

Source: github.com/IST-DASLab/gptq (datautils.py, opt.py), github.com/IST-DASLab/sparsegpt, github.com/locuslab/wanda
(lib/eval.py, which takes the whole context where it is longer: 4,096 for Llama 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, from_windows
from gradprobe_hf.data.sources import Rows, Source, is_dataset, is_streamed, open_source, rows_from, text_rows
from gradprobe_hf.data.text.mixture import is_mixture
from gradprobe_hf.data.text.text_options import PYDOC, SELF
from gradprobe_hf.model.families import is_causal, longest_text

WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1:test"
LONGEST = 2048
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class PaperSpec:
    """How a text is read.

    Attributes:
        length: tokens in a window; None: the model's context, at most `LONGEST`.
        batch_size: windows in a batch.
        text_column: of a dataset; None: `text`.
        add_special_tokens: whether the tokenizer begins the text as it begins every text.
    """

    length: int | None = None
    batch_size: int = 1
    text_column: str | None = None
    add_special_tokens: bool = True


def paper_batches(source: Any, model: PreTrainedModel, processing_class: Any, spec: PaperSpec = PaperSpec()) -> Batches:
    """All full windows of a text, in order.

    Args:
        source: a file, a Hub dataset `id[:config[:split]]`, a list of rows or a `Dataset`; None: `WIKITEXT`. The lines
            of a .txt file are its rows, as they are in the raw file that the data set was made from.
        processing_class: the tokenizer.

    Raises:
        ValueError: no causal language model, no tokenizer, a stream, less text than one window, or windows that the
            model cannot take.
        OSError: the Hub cannot be reached.
    """
    if not is_causal(model):
        raise ValueError(
            f"the paper protocol is the perplexity of a causal language model, and {type(model).__name__} is none."
        )
    if processing_class is None:
        raise ValueError("the paper protocol tokenises text, and no tokenizer was found beside the model.")
    opened = _rows(WIKITEXT if source is None else source)
    context = longest_text(model)
    length = min(LONGEST, context or LONGEST) if spec.length is None else spec.length
    if context is not None and length > context:
        raise ValueError(
            f"sequence_length={length} is more than the {context} positions of {type(model).__name__}; pass "
            f"sequence_length={context}."
        )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    text = SEPARATOR.join(_texts(opened.rows, spec.text_column or "text"))
    # `verbose=False`: a tokenizer warns that a whole text is longer than its model's context, and it is cut below.
    encoded = tokenizer(text, add_special_tokens=spec.add_special_tokens, verbose=False)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.long)
    windows = len(ids) // length
    if not windows:
        raise ValueError(
            f"{opened.name} holds {len(ids):,} tokens, less than one window of {length}: give more text, or "
            "ask for shorter windows (sequence_length, --sequence-length)."
        )
    protocol = (
        f"the paper protocol: all {windows} full windows of {length} tokens, in order, of the rows joined by blank "
        f"lines and tokenised once ({_beginning(tokenizer, ids)})"
    )
    return from_windows(
        ids[: windows * length].view(windows, length),
        spec.batch_size,
        source=opened.name,
        protocol=protocol,
        dataset_id=opened.dataset_id,
    )


def _rows(source: Any) -> Source:
    path = Path(source).expanduser() if isinstance(source, (str, Path)) else None
    if path is not None and path.suffix.lower() == ".txt" and path.is_file():
        try:
            with path.open(encoding="utf-8-sig") as file:
                lines = list(file)  # not `splitlines`, to which a form feed is the end of a line, too
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} cannot be read as text: {error}. Save it as UTF-8.") from error
        return Source([line if line.strip() else "" for line in lines], path.name)
    if is_mixture(source) or source in (PYDOC, SELF):
        raise ValueError(
            f"the paper protocol measures on one text that others can have, and {source!r} is none: give a file, a Hub "
            "dataset, rows or a Dataset, or measure on windows (evaluation_protocol, --protocol)."
        )
    if path is not None:
        opened = open_source(str(source), "evaluation", seed=0)
    elif is_dataset(source):
        opened = Source(source, "a Dataset")
    elif not isinstance(source, Sequence):
        raise ValueError(
            f"the paper protocol measures on texts, and got {type(source).__name__}: give a file, a Hub dataset, a "
            "list of texts or rows, or a Dataset, or measure on windows (evaluation_protocol, --protocol)."
        )
    elif source and isinstance(source[0], Mapping):
        opened = Source(rows_from(source), f"{len(source)} rows")
    else:
        opened = Source(text_rows(source), f"{len(source)} texts")
    if is_streamed(opened.rows):
        raise ValueError(f"{opened.name} is streamed; the paper protocol reads the whole text, in its order.")
    return opened


def _texts(rows: Rows, column: str) -> list[str]:
    """Every row, also the empty ones: the scripts join those too."""
    if isinstance(rows, list):
        return rows
    if column not in (columns := rows.column_names or []):
        raise ValueError(f"the data set has no column {column!r}; its columns are {', '.join(columns)}.")
    texts = [row[column] or "" for row in rows]
    if (other := next((one for one in texts if not isinstance(one, str)), None)) is not None:
        raise ValueError(
            f"the column {column!r} must hold texts for the paper protocol, and holds {type(other).__name__}: name "
            "another with text_column (--text-column)."
        )
    return texts


def _beginning(tokenizer: Any, ids: torch.Tensor) -> str:
    special = [token for token in ids[:1].tolist() if token in tokenizer.all_special_ids]
    return f"{tokenizer.convert_ids_to_tokens(special[0])} at the very start only" if special else "no special tokens"
