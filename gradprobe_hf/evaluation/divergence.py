"""Divergence: how far the predictions of a pruned model are from the dense model's, token by token.

    KL = mean_t sum_v p(v | t) (log p(v | t) - log q(v | t))      p dense, q pruned; natural logarithm

Perplexity asks how well the text is predicted, and may stay while the predictions change; these ask whether the model
is still the same one. Both models run on a batch, one behind the other: no more than one batch of logits of each is
ever there, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.evaluation.perplexity import Measurement, exp, measure, measurement
from gradprobe_hf.model.families import is_causal
from gradprobe_hf.model.fsdp import is_sharded, resharded
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.loss import Batch, SummedCrossEntropy, next_token_logits, portions
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.probe.steps import share
from gradprobe_hf.tasks.columns import IGNORED

RESAMPLES = 2000
DRAWN_AT_ONCE = 10**7  # windows: 80 MB of their numbers, and twice that of what is drawn
CONFIDENCE = 0.95
SEED = 0

Serving = Callable[[], AbstractContextManager[None]]

# The columns of a window: the summed loss of each model, the tokens that were predicted, the summed divergence, and the
# tokens whose most likely next token is the same.
DENSE, PRUNED, TOKENS, KL, SAME = range(5)


@dataclass(frozen=True)
class Divergence:
    """A pruned model beside the dense one, on the same tokens.

    Attributes:
        kl: mean KL divergence of its next-token distribution from the dense one, in nats per token, >= 0.
        top1_agreement: share of tokens whose most likely next token is the same, in [0, 1].
        perplexity_ratio: pruned / dense.
        perplexity_ratio_interval: 95% of it, by a paired bootstrap over windows: what another draw of the windows might
            have come to; None of one window.
    """

    kl: float
    top1_agreement: float
    perplexity_ratio: float
    perplexity_ratio_interval: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WindowLosses:
    """What each window adds, in the order of the batches: with those of another model they are compared in pairs.

    Attributes:
        dense, pruned: summed losses `[windows]`, in nats, float64.
        tokens: predicted in each `[windows]`.
    """

    dense: Tensor
    pruned: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class PairedMeasurement:
    """The losses of two models on the same batches.

    Attributes: `divergence` and `windows`: None where there are no next tokens.
    """

    dense: Measurement
    pruned: Measurement
    divergence: Divergence | None = None
    windows: WindowLosses | None = None

    def to_dict(self) -> dict[str, Any]:
        divergence = None if self.divergence is None else self.divergence.to_dict()
        return {"dense": self.dense.to_dict(), "pruned": self.pruned.to_dict(), "divergence": divergence}


@torch.no_grad()
def measure_pair(
    dense: Workload,
    pruned: Workload,
    serving: Serving = nullcontext,
    label: str = "evaluation",
    serving_dense: Serving = nullcontext,
) -> PairedMeasurement:
    """The mean losses of two models over the same batches, and how far their predictions are from each other.

    All processes share the batches and return the same result. Losses are to the bit what `measure` returns.

    Args:
        dense, pruned: of the same batches; of one model, where `serving` tells them apart.
        serving: entered for each pass of the pruned one, which makes it so.
        label: for the progress bar and for errors.
        serving_dense: entered for each pass of the dense one, so that both are computed alike.

    Raises:
        ValueError: nothing was counted, a loss is NaN, or the models have different vocabularies.
    """
    if not _predicts_tokens(dense) or not _predicts_tokens(pruned):
        with serving_dense():
            before = measure(dense, f"{label} (dense)")
        with serving():
            return PairedMeasurement(before, measure(pruned, f"{label} (pruned)"))
    losses, windows = _both_passes((dense, serving_dense), (pruned, serving), label)
    # One collective: every process has the rows of its own windows, and zeros in place of the others.
    totals = dense.processes.sum_(torch.cat([losses, windows.flatten()]))
    windows = totals[2:].view_as(windows)
    terms = int(windows[:, TOKENS].sum())
    before, after = (
        measurement(float(total), terms, f"{label} ({name})", is_perplexity=True)
        for total, name in zip(totals[:2], ("dense", "pruned"), strict=True)
    )
    of_windows = WindowLosses(windows[:, DENSE], windows[:, PRUNED], windows[:, TOKENS])
    return PairedMeasurement(before, after, _divergence(before, after, windows), of_windows)


def check_one_vocabulary(one: Any, other: Any, names: tuple[str, str]) -> None:
    """Raise ValueError for two tokenizers whose ids mean different tokens."""
    words = [dict(tokenizer.get_vocab()) if hasattr(tokenizer, "get_vocab") else None for tokenizer in (one, other)]
    if None not in words and words[0] != words[1]:
        raise ValueError(
            f"{names[0]} and {names[1]} have different tokenizers: what one predicts cannot be compared with the other "
            "token by token. Give the model that the first was pruned from."
        )


def _predicts_tokens(work: Workload) -> bool:
    return work.loss_fn is None and is_causal(work.model) and all("input_ids" in batch for batch in work.batches)


def _both_passes(
    of_dense: tuple[Workload, Serving], of_pruned: tuple[Workload, Serving], label: str
) -> tuple[Tensor, Tensor]:
    """This process's part of both summed losses `[2]`, and of the table of windows `[windows, 5]`, in float64."""
    (dense, serving_dense), (pruned, serving) = of_dense, of_pruned
    batches = list(dense.batches)
    firsts = torch.tensor([0, *map(row_count, batches)]).cumsum(0).tolist()
    numbered = list(zip(batches, firsts, strict=False))
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    parts: list[tuple[int, Tensor]] = []
    modes = (resharded(dense.model), resharded(pruned.model), eval_mode(dense.model), eval_mode(pruned.model))
    with dense.telling(), ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        steps = share(numbered, dense.processes, is_sharded(dense.model))
        for (batch, first), counted in tqdm(steps, desc=label, unit="batch", disable=not dense.progress, leave=False):
            with serving_dense():
                p, labels = _logits(dense, batch)
            with serving():
                q, _ = _logits(pruned, batch)
            if counted:
                for each, logits in zip(losses, (p, q), strict=True):
                    each.append(SummedCrossEntropy.apply(logits, labels.to(logits.device)))
                parts.append((first, _of_windows(p, q, labels, row_count(batch))))
    table = torch.zeros(firsts[-1], 5, dtype=torch.float64)
    for first, part in parts:
        table[first : first + len(part)] = part.cpu()
    return torch.tensor([sum(map(float, each)) for each in losses], dtype=torch.float64), table


def _logits(work: Workload, batch: Batch) -> tuple[Tensor, Tensor]:
    return next_token_logits(work.model, send_to_device(batch, input_device(work.model)))


def _of_windows(p: Tensor, q: Tensor, labels: Tensor, windows: int) -> Tensor:
    """The columns of each window of a batch, `[windows, 5]`. Args: p, q: logits `[windows * tokens, vocabulary]`."""
    if p.shape != q.shape:
        raise ValueError(
            f"one model has a vocabulary of {p.shape[-1]:,} tokens and the other of {q.shape[-1]:,}: they cannot be "
            "compared token by token."
        )
    values = torch.cat([_of_tokens(p[rows], q[rows].to(p.device), labels[rows]) for rows in portions(p)])
    return values.view(windows, -1, values.shape[-1]).sum(1)


def _of_tokens(p: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """The columns of each token, `[tokens, 5]`, in float32 at least; zeros where nothing is to be predicted."""
    wide = torch.promote_types(p.dtype, torch.float32)
    p, q = p.to(wide), q.to(wide)
    same = p.argmax(-1) == q.argmax(-1)
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    counted = labels != IGNORED
    chosen = labels.masked_fill(~counted, 0)[:, None]
    probability = log_p.exp()
    # A token that is masked in the model (a logit of -inf) would be 0 * (inf - inf).
    divergence = torch.where(probability > 0, probability * (log_p - log_q), 0).sum(-1)
    columns = [-log_p.gather(1, chosen)[:, 0], -log_q.gather(1, chosen)[:, 0], counted, divergence]
    return torch.stack([column.to(wide) for column in (*columns, same)], dim=-1).masked_fill(~counted[:, None], 0)


def _divergence(before: Measurement, after: Measurement, windows: Tensor) -> Divergence:
    return Divergence(
        kl=max(0.0, float(windows[:, KL].sum()) / before.terms),  # rounding may take what is 0 below it
        top1_agreement=float(windows[:, SAME].sum()) / before.terms,
        perplexity_ratio=exp(after.loss - before.loss),
        perplexity_ratio_interval=ratio_interval(windows[:, DENSE], windows[:, PRUNED], windows[:, TOKENS]),
    )


def ratio_interval(dense: Tensor, pruned: Tensor, tokens: Tensor) -> tuple[float, float] | None:
    """A 95% interval of the ratio of perplexities, by a paired bootstrap over windows; None of one window.

    Windows are drawn with replacement, each with both its losses: how hard a window is cancels, and what is left is how
    much the difference varies between windows. Source: Koehn 2004, Statistical significance tests for MT evaluation.

    Args:
        dense, pruned: summed losses `[windows]`, in nats.
        tokens: predicted in each `[windows]`.

    >>> windows = torch.tensor([10.0, 20.0, 30.0])
    >>> ratio_interval(windows, windows + 0.5, torch.tensor([5.0, 5.0, 5.0]))
    (1.10..., 1.10...)
    """
    # A window without a token to predict says nothing of either; a draw of such alone would have no ratio.
    dense, pruned, tokens = (one[tokens > 0] for one in (dense, pruned, tokens))
    if len(tokens) < 2:
        return None
    generator, difference = torch.Generator().manual_seed(SEED), pruned - dense
    # A few draws at a time: all of them are gigabytes where windows are many.
    at_once = max(1, DRAWN_AT_ONCE // len(tokens))
    log_ratios = torch.empty(RESAMPLES, dtype=difference.dtype)
    for ratios in log_ratios.split(at_once):
        drawn = torch.randint(len(tokens), (len(ratios), len(tokens)), generator=generator)
        ratios.copy_(difference[drawn].sum(1) / tokens[drawn].sum(1))
    # A window of infinite loss: between two infinite ratios quantiles would be NaN.
    log_ratios = log_ratios.clamp(max=torch.finfo(log_ratios.dtype).max)
    low, high = log_ratios.quantile(torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).to(log_ratios)).tolist()
    return exp(low), exp(high)
