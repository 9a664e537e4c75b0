"""Metrics: predictions and references -> one number, as in `evaluate`. To add one: a function, and a row here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import hypot
from operator import mul
from typing import Any, Literal

Compared = Literal["labels", "texts", "embeddings"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One way to compare what a model predicts with what is right.

    Attributes:
        function: all predictions and all references, in the same order -> the metric.
        compares: whole numbers, texts, or lists of numbers.
        higher_is_better: False for an error rate.
        title: for a table.
        sentence: what it is, for the card.
        check: raises ValueError where it cannot be computed here.
    """

    function: Callable[[Sequence[Any], Sequence[Any]], float]
    compares: Compared
    higher_is_better: bool = True
    title: str
    sentence: str
    check: Callable[[], Any] = lambda: None


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> float:
    """The share of predictions that are right, in [0, 1].

    >>> accuracy([1, 0, 2, 2], [1, 1, 2, 0])
    0.5
    """
    return sum(a == b for a, b in zip(predictions, references, strict=True)) / len(references)


def f1(predictions: Sequence[int], references: Sequence[int]) -> float:
    """F1 of every class, `2 hits / (predicted + there)`, and their mean over the classes that occur, in [0, 1].

    As scikit-learn's `f1_score(average="macro", zero_division=0)`.

    >>> f1([1, 1, 0, 0], [1, 0, 0, 0])  # 2/3 for class 1, 4/5 for class 0
    0.7333333333333334
    """
    # In one go: tokens of a language model have as many classes as it has words.
    hits = Counter(a for a, b in zip(predictions, references, strict=True) if a == b)
    counted = Counter(predictions) + Counter(references)
    scores = [2 * hits[one] / counted[one] for one in sorted(counted)]
    return sum(scores) / len(scores)


def word_error_rate(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Words to replace, insert and delete, over all texts, per word of the references; >= 0, and may exceed 1.

    Words are what white space separates, as they are written: case and punctuation count.

    >>> word_error_rate(["the cat sat"], ["the cat sat down"])
    0.25

    Raises:
        ValueError: references without a word.
    """
    pairs = [(a.split(), b.split()) for a, b in zip(predictions, references, strict=True)]
    if not (words := sum(len(b) for _, b in pairs)):
        raise ValueError("metric='wer' is errors per word of the references, and these have no word: give others.")
    return sum(_edits(a, b) for a, b in pairs) / words


def _edits(predicted: Sequence[str], reference: Sequence[str]) -> int:
    """Levenshtein's distance, a row of its table at a time."""
    row = list(range(len(reference) + 1))
    for deleted, word in enumerate(predicted, 1):
        new = [deleted]
        for (diagonal, above), wanted in zip(pairwise(row), reference, strict=True):
            new.append(min(above + 1, new[-1] + 1, diagonal + (word != wanted)))
        row = new
    return row[-1]


def bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU in [0, 1], as the `evaluate` library computes it.

    Source: Papineni et al. 2002 (aclanthology.org/P02-1040).
    """
    found = _bleu_script().compute(predictions=list(predictions), references=[[text] for text in references])
    return float(found["bleu"])


def cosine(predictions: Sequence[Sequence[float]], references: Sequence[Sequence[float]]) -> float:
    """The mean cosine of the angle between vectors, in [-1, 1]; 0 where one of them is zero.

    >>> cosine([[1, 0], [2, 0]], [[3, 0], [0, 1]])
    0.5
    >>> cosine([[0, 0]], [[3, 0]])
    0.0
    """
    pairs = zip(predictions, references, strict=True)
    return sum(sum(map(mul, a, b)) / (hypot(*a) * hypot(*b) or 1) for a, b in pairs) / len(references)


@cache
def _bleu_script() -> Any:
    """Raises ValueError where the script is neither in the cache nor to be had."""
    import evaluate

    try:
        return evaluate.load("bleu")
    except (OSError, ImportError) as error:
        raise ValueError(
            f"metric='bleu' is computed by the script of the `evaluate` library, which comes from the Hub: {error}. "
            "Load it once with network, `evaluate.load('bleu')`, or leave metric unset."
        ) from error


METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        function=accuracy, compares="labels", title="accuracy", sentence="the share of predictions that are right"
    ),
    "f1": Metric(function=f1, compares="labels", title="F1", sentence="F1 of each class, averaged over the classes"),
    "cosine": Metric(
        function=cosine,
        compares="embeddings",
        title="cosine to the embeddings before",
        sentence="the mean cosine of an embedding and the one that it was before anything was pruned",
    ),
    "wer": Metric(
        function=word_error_rate,
        compares="texts",
        higher_is_better=False,
        title="word error rate",
        sentence="words to replace, insert and delete per word of the references, as they are written",
    ),
    "bleu": Metric(
        function=bleu,
        compares="texts",
        title="BLEU",
        sentence="corpus BLEU of the `evaluate` library, in [0, 1]",
        check=_bleu_script,
    ),
}
