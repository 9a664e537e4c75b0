"""Packing: documents -> rows of token ids, drawn with a seed.

Packed, documents are joined and cut into consecutive full windows; the windows are shuffled and the first taken. Else
every row is one document, cut off where it is too long.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradprobe_hf.data.sources import Source, is_streamed, order_of_parts
from gradprobe_hf.data.text.chat import ASSISTANT, ChatTemplate, RenderedChat
from gradprobe_hf.data.text.documents import documents, holds_chats, named_columns
from gradprobe_hf.data.text.pieces import ENDED, Pieces, is_large, read_of_stream
from gradprobe_hf.data.text.special_tokens import SpecialTokens, tokenizer_of
from gradprobe_hf.data.text.text_options import BLANK_LINE, EOS, TextOptions
from gradprobe_hf.runtime.option_checks import whole
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.conversation import Chat

logger = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 8  # an upper estimate: how much of a stream is read before it is tokenised
_ASKED_FOR_ROLES = 100  # chats
MANY_LEFT_OUT = 0.1  # of chats: what is left says little of the others
LONGEST_EXAMPLE = 2_000  # characters of the first document that a report shows

Row = dict[str, Tensor]


@dataclass(frozen=True)
class WindowSpec:
    """Which windows to draw from a text.

    Attributes:
        samples: windows.
        sequence_length: tokens in a window, special ones among them.
        batch_size: windows in a batch.
        seed: draws the calibration windows; evaluation has one of its own.
        text: how a text becomes windows.
        at_most: whether fewer will do, where the text holds no more.
        held_out: draw other windows than the `samples` of this seed: as many of what they leave, or fewer, or none.
    """

    samples: int
    sequence_length: int
    batch_size: int
    seed: int = 0
    text: TextOptions = field(default_factory=TextOptions)
    at_most: bool = False
    held_out: int = 0

    def __post_init__(self) -> None:
        whole("num_samples", self.samples, at_least=1)
        whole("sequence_length", self.sequence_length, at_least=2)  # of one token nothing is predicted
        whole("batch_size", self.batch_size, at_least=1)

    @property
    def drawn(self) -> slice:
        """Which windows of a seeded order are drawn."""
        return slice(self.samples, self.samples + self.held_out) if self.held_out else slice(0, self.samples)

    @property
    def words(self) -> str:
        """What a protocol says of windows that are held out."""
        return held_out_words(self.drawn.start)


@dataclass(frozen=True)
class Drawn:
    """Rows, before they are batched, and what a report says about them.

    Attributes:
        rows: `input_ids` `[tokens]` of each, and what else belongs to its tokens.
        dataset_id: of the data set of the Hub that all rows are from; None of any other text, and of a mixture.
        mixed_ids: of the data sets of the Hub in a mixture.
        example: the first document as a template has rendered it; None where there is none.
    """

    rows: list[Row]
    source: str
    protocol: str
    dataset_id: str | None = None
    example: str | None = None
    mixed_ids: tuple[str, ...] = ()

    def described(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "protocol": self.protocol,
            "dataset_id": self.dataset_id,
            "example": self.example,
            "mixed_ids": self.mixed_ids,
        }


@dataclass(frozen=True)
class _Stream:
    """Documents in one row of tokens.

    Attributes:
        ids: `[tokens]`.
        counted: of each token whether it is part of the loss; None: all are.
        joined: how, in the words of a protocol.
        cut: what windows are, in the same.
        of_samples: the first of these tokens, that the samples are drawn from; None: all.
    """

    ids: Tensor
    counted: Tensor | None
    joined: str
    example: str | None = None
    of_samples: int | None = None
    cut: str = "cut one after the other from the tokenised text"

    def order(self, own: int, seed: int) -> Tensor:
        """The numbers of windows of `own` tokens in a seeded order; behind those of the samples come what is left."""
        whole = len(self.ids) // own
        first = whole if self.of_samples is None else min(whole, self.of_samples // own)
        return torch.cat(
            (torch.randperm(first, generator=torch.Generator().manual_seed(seed)), torch.arange(first, whole))
        )


def held_out_words(behind: int) -> str:
    """What a protocol says of windows, or rows, that come behind so many which calibrate."""
    return f", behind the first {behind}, which are for calibration" if behind else ""


def rows_of(windows: Tensor, unpredicted: int = 0, counted: Tensor | None = None) -> list[Row]:
    """Windows of token ids `[samples, tokens]` as rows, with labels where not every token is one.

    Args:
        unpredicted: how many tokens at the beginning of each are no part of the loss.
        counted: `[samples, tokens]`, of each token whether it is part of the loss.
    """
    if unpredicted <= 1 and counted is None:  # the first token of a window is never predicted
        return [{"input_ids": window} for window in windows]
    labels = windows.clone()
    labels[:, :unpredicted] = IGNORED
    if counted is not None:
        labels[~counted] = IGNORED
    return [{"input_ids": window, "labels": label} for window, label in zip(windows, labels, strict=True)]


def draw_packed(opened: Source, spec: WindowSpec, processing_class: Any, special: SpecialTokens) -> Drawn:
    """Full windows of all documents joined.

    Raises:
        ValueError: too little text, or none.
    """
    samples, length, seed = spec.samples, spec.sequence_length, spec.seed
    own = length - len(special)  # tokens of a window that are of the text
    if own < 1:
        raise ValueError(f"sequence_length={length} leaves no room for text: {special.described}. Ask for longer ones.")
    made = _chat_stream if holds_chats(opened, spec.text) else _text_stream
    stream = made(opened, spec, processing_class, special)
    whole = len(stream.ids) // own
    samples = min(samples, whole) if spec.at_most and whole else samples
    if whole < samples and not spec.held_out:
        needed = f"a window needs {own:,}" if spec.at_most else f"{samples} windows need {samples * own:,}"
        raise ValueError(
            f"{opened.name} holds {len(stream.ids):,} tokens, which is {whole} full windows of {own}; {needed} tokens. "
            "Give more text, or ask for "
            + (f"at most {whole} samples or shorter windows." if whole else "shorter windows.")
        )
    order = stream.order(own, seed)[spec.drawn]
    windows = special.around(stream.ids[: whole * own].view(whole, own)[order])
    counted = None
    if stream.counted is not None:
        inside = stream.counted[: whole * own].view(whole, own)[order]
        counted = F.pad(inside, (len(special.before), len(special.after)), value=False)
    streamed = "; of rows drawn from a stream" if is_streamed(opened.rows) else ""
    columns = named_columns(opened, spec.text)
    rows = rows_of(windows, special.unpredicted, counted)
    silent = silent_rows(rows, opened.name, "windows", "packing=False (--packing off) leaves such chats out")
    protocol = (
        f"{len(order)} windows of {length} tokens, {stream.cut}{columns} "
        f"({stream.joined}{special.described}{streamed}), shuffled with seed {seed}{spec.words}{_loss(spec.text)}"
        f"{silent}"
    )
    if not any(map(predicts, rows)) and not spec.held_out:
        raise ValueError(
            f"{opened.name}: none of the windows holds a token that counts in the loss{_who_speaks(opened, spec)}."
        )
    return Drawn(rows, opened.name, protocol, opened.dataset_id, stream.example)


def silent_rows(rows: Sequence[Row], source: str, what: str, remedy: str = "") -> str:
    """What a protocol says of rows in which no token counts: they are run for nothing. Many are told."""
    silent = sum(not predicts(row) for row in rows)
    if not silent or silent == len(rows):  # all of them are an error of their own
        return ""
    if silent > MANY_LEFT_OUT * len(rows):
        counts = sum(int((row["labels"][1:] != IGNORED).sum()) for row in rows if "labels" in row)
        logger.warning(
            "%s: in %d of %d %s no token counts in the loss, and in all together %s do: the rest is run for nothing. "
            "%s",
            source,
            silent,
            len(rows),
            what,
            f"{counts:,}",
            remedy or "Leave such rows out (dataset.filter)",
        )
    return f"; in {silent} of {len(rows)} {what} no token counts"


def draw_documents(opened: Source, spec: WindowSpec, processing_class: Any, special: SpecialTokens) -> Drawn:
    """A document each, cut off behind `sequence_length` tokens.

    Raises:
        ValueError: too few documents.
    """
    samples, chats = spec.samples, holds_chats(opened, spec.text)
    made, left_out = _chat_rows if chats else _text_rows, Counter[bool]()
    that_predict = _that_predict(made(opened, spec, processing_class, special), left_out)
    found = list(islice(that_predict, spec.drawn.start, spec.drawn.stop))
    samples = len(found) if spec.held_out or (spec.at_most and found) else samples
    if len(found) < samples:
        who = ""
        what, remedy = "of two tokens or more", "set packing=True (--packing on) to cut windows from all of them joined"
        if spec.text.assistant_only_loss and chats:
            what = f"in which the assistant speaks within {spec.sequence_length} tokens"
            who = _who_speaks(opened, spec)
            remedy = "count all tokens (assistant_only_loss=False, --assistant-only-loss off)"
        held = f"{len(found)} document{'s' * (len(found) != 1)}"
        raise ValueError(
            f"{opened.name} holds {held} {what}{who} and {samples} were asked for. Give more, ask for "
            f"fewer samples, or {remedy}."
        )
    begun = "as the tokenizer's chat template has them" if chats else special.described
    beside = _left_out(opened, spec, left_out) if spec.text.assistant_only_loss and chats else ""
    protocol = (
        f"{samples} documents{named_columns(opened, spec.text)}, a row each, of at most {spec.sequence_length} tokens, "
        f"padded and masked ({begun}), "
        f"drawn with seed {spec.seed}{spec.words}{_loss(spec.text)}{beside}"
    )
    example = next((_shortened(text) for _, text in found), None)
    return Drawn([row for row, _ in found], opened.name, protocol, opened.dataset_id, example)


def _text_rows(
    opened: Source, spec: WindowSpec, processing_class: Any, special: SpecialTokens
) -> Iterator[tuple[Row, str | None]]:
    """Texts as the tokenizer begins, ends and truncates them, and as a template renders them, if there is one."""
    tokenizer = tokenizer_of(processing_class)
    cut = {"truncation": True, "max_length": spec.sequence_length, "verbose": False}
    begin = getattr(tokenizer, "bos_token", None)
    for text in documents(opened, spec.text, _order(opened, spec.seed)):
        # A chat that was rendered beforehand has its special tokens in it: with others it would begin twice.
        wanted = spec.text.add_special_tokens and not (begin and str(text).startswith(begin))
        ids = tokenizer(text, add_special_tokens=wanted, **cut)["input_ids"]
        (row,) = rows_of(torch.tensor([ids], dtype=torch.long), special.unpredicted)
        is_whole = len(ids) < spec.sequence_length
        yield row, (str(text) if is_whole else tokenizer.decode(ids)) if spec.text.text_template else None


def _chat_rows(
    opened: Source, spec: WindowSpec, processing_class: Any, special: SpecialTokens
) -> Iterator[tuple[Row, str | None]]:
    del special  # the template has them
    tokenizer = tokenizer_of(processing_class)
    for chat in _chats(opened, spec, processing_class):
        ids, counted = torch.tensor([chat.ids]), torch.tensor([chat.counted])
        only = counted[:, : spec.sequence_length] if spec.text.assistant_only_loss else None
        (row,) = rows_of(ids[:, : spec.sequence_length], 0, only)
        is_whole = len(chat.ids) <= spec.sequence_length
        yield row, chat.text if is_whole else tokenizer.decode(chat.ids[: spec.sequence_length])


def _that_predict(rows: Iterable[tuple[Row, str | None]], left_out: Counter[bool]) -> Iterator[tuple[Row, str | None]]:
    """The rows with a token that counts. Args: left_out: where those that are drawn are counted, by whether they go."""
    for row, text in rows:
        left_out[not predicts(row)] += 1
        if predicts(row):
            yield row, text


def _left_out(opened: Source, spec: WindowSpec, left_out: Counter[bool]) -> str:
    """What a protocol says of chats whose answers begin behind the window. Many are told: what is left is short."""
    gone, drawn = left_out[True], left_out.total()
    if not gone:
        return ""
    said = f"the assistant does not speak within {spec.sequence_length} tokens"
    if gone > MANY_LEFT_OUT * drawn:
        logger.warning(
            "%s: %d of %d chats are left out, because %s: those that are read are the short ones. Ask for a longer "
            "sequence_length (--sequence-length), or set packing=True (--packing on)",
            opened.name,
            gone,
            drawn,
            said,
        )
    return f"; {gone} of {drawn} chats left out, in which {said}"


def _text_stream(opened: Source, spec: WindowSpec, processing_class: Any, special: SpecialTokens) -> _Stream:
    """The tokens of texts, joined; of a stream at least as many as are needed, if it has them."""
    separator = BLANK_LINE if spec.text.document_separator is None else spec.text.document_separator
    texts, is_part, rows_drawn = _enough(opened, spec)
    if not any(text.strip() for text in texts):
        raise ValueError(f"there is no text in {opened.name}{', only white space' if texts else ''}.")
    tokenizer = tokenizer_of(processing_class)
    joined = f"documents separated by {separator_words(separator, tokenizer)}; " if len(texts) > 1 else ""
    joined = rows_drawn + joined
    example = _shortened(texts[0]) if spec.text.text_template else None
    end = [eos_token_id(tokenizer)] if separator == EOS else []
    border = ENDED if end else separator

    def tokens_of(text: str) -> list[int]:
        # Several documents are one text, unless a token ends them, so that the tokenizer sees what stands at borders.
        # `verbose=False`: it warns that a whole text is longer than its model's context, and it is cut below.
        parts = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in text.split(ENDED)]
        return [*parts[0], *(token for part in parts[1:] for token in (*end, *part))]

    if not is_part:
        ids = [*tokens_of(border.join(texts)), *end]
        return _Stream(torch.tensor(ids, dtype=torch.long), None, joined, example)
    own = spec.sequence_length - len(special)
    pieces = Pieces.of(border.join(texts), CHARACTERS_PER_TOKEN * own, spec.seed)
    ids = pieces.beginnings(own, spec.samples + spec.held_out, tokens_of)
    return _Stream(torch.tensor(ids, dtype=torch.long), None, joined, example, spec.samples * own, pieces.words)


def _chat_stream(opened: Source, spec: WindowSpec, processing_class: Any, special: SpecialTokens) -> _Stream:
    """The tokens of chats in a seeded order, as many as are needed.

    What the template begins each with is left out where the windows begin with it: no window has it twice.
    """
    separator, tokenizer = spec.text.document_separator, tokenizer_of(processing_class)
    between: list[int] = []
    if separator == EOS:
        between = [eos_token_id(tokenizer)]
    elif separator:
        between = list(tokenizer(separator, add_special_tokens=False)["input_ids"])
    ids: list[int] = []
    counted: list[bool] = []
    own, example, of_samples = spec.sequence_length - len(special), None, None
    for chat in _chats(opened, spec, processing_class):
        skipped = len(special.before) if tuple(chat.ids[: len(special.before)]) == special.before else 0
        ids += [*chat.ids[skipped:], *between]
        counted += [*chat.counted[skipped:], *(not spec.text.assistant_only_loss for _ in between)]
        example = example or chat.text
        if of_samples is None and len(ids) >= spec.samples * own:
            of_samples = len(ids)
        if of_samples is not None and len(ids) >= of_samples + spec.held_out * own:
            break
    words = f", separated by {separator_words(separator, tokenizer)}" if separator else ""
    only = torch.tensor(counted, dtype=torch.bool) if spec.text.assistant_only_loss else None
    joined = f"chats in the tokenizer's chat template{words}; "
    return _Stream(torch.tensor(ids, dtype=torch.long), only, joined, _shortened(example), of_samples)


def _chats(opened: Source, spec: WindowSpec, processing_class: Any) -> Iterator[RenderedChat]:
    template = ChatTemplate.of(processing_class, opened.name)
    for chat in documents(opened, spec.text, _order(opened, spec.seed)):
        assert isinstance(chat, Chat), "all documents are, if the first is one"
        yield template.render(chat, spec.text.assistant_only_loss)


def _who_speaks(opened: Source, spec: WindowSpec) -> str:
    """The roles of the first chats, where nobody is called as templates call the assistant; for an error."""
    if not (spec.text.assistant_only_loss and holds_chats(opened, spec.text)):
        return ""
    first = islice(documents(opened, spec.text, _order(opened, spec.seed)), _ASKED_FOR_ROLES)
    roles = dict.fromkeys(message["role"] for chat in first if isinstance(chat, Chat) for message in chat.messages)
    if not roles or ASSISTANT in roles:
        return ""
    return f" (the roles are {', '.join(map(repr, roles))}: who answers must be called {ASSISTANT!r})"


def _order(opened: Source, seed: int) -> Sequence[int] | None:
    """Row numbers in a seeded order; None of a stream, which is shuffled already."""
    if is_streamed(opened.rows):
        return None
    return torch.randperm(len(opened.rows), generator=torch.Generator().manual_seed(seed)).tolist()


def _enough(opened: Source, spec: WindowSpec) -> tuple[list[str], bool, str]:
    """The texts, whether pieces of them are drawn, and how their rows were, in the words of a protocol.

    Of a stream, and of a data set that is as large as one, no more are read than that takes.
    """
    needed = spec.samples * spec.sequence_length * CHARACTERS_PER_TOKEN
    order = order_of_parts(opened.rows, spec.seed)
    if order is not None or is_streamed(opened.rows):
        read = opened if opened.in_order is None else replace(opened, rows=opened.in_order)
        texts, left = [], read_of_stream(needed)
        for text in documents(read, spec.text, order):
            texts.append(str(text))
            left -= len(texts[-1])
            if left <= 0:
                return texts, True, "" if order is None else "parts of the rows drawn; "
        if order is None:
            return texts, False, ""
    # A large data set of little text is read once more, for its own order.
    texts = [str(text) for text in documents(opened, spec.text)]
    return texts, is_large(sum(map(len, texts)), needed), ""


def predicts(row: Row) -> bool:
    """Whether a token of a row is part of the loss."""
    return bool((row.get("labels", row["input_ids"])[1:] != IGNORED).any())


def separator_words(separator: str, tokenizer: Any) -> str:
    """A separator in the words of a protocol.

    >>> separator_words("\\n\\n", None), separator_words(" | ", None), separator_words("", None)
    ('a blank line', "' | '", 'nothing')
    """
    if separator == EOS:
        return str(tokenizer.eos_token)
    return {BLANK_LINE: "a blank line", "": "nothing"}.get(separator, repr(separator))


def eos_token_id(tokenizer: Any) -> int:
    """The id of the end-of-text token, or ValueError."""
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise ValueError(
            f"document_separator='eos' (--document-separator eos) needs an EOS token, and this "
            f"{type(tokenizer).__name__} has none; give a text that separates documents."
        )
    return int(tokenizer.eos_token_id)


def _loss(text: TextOptions) -> str:
    return "; the loss is over the assistant's tokens alone" if text.assistant_only_loss else ""


def _shortened(example: str | None) -> str | None:
    return example if example is None or len(example) <= LONGEST_EXAMPLE else example[:LONGEST_EXAMPLE] + " ..."
