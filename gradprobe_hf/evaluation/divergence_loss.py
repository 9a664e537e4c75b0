"""The divergence as a loss: how far the pruned model's next-token distribution q is from the dense model's p, in nats.

    KL   = sum_v p_v (log p_v - log q_v)                                                     over the vocabulary

    KL_k = sum_{v in S} p_v (log p_v - log q_v) + p_R (log p_R - log q_R)                     S: the k largest p_v

with R all other tokens taken as one: p_R = 1 - sum_{v in S} p_v, and q_R alike over the same S. KL_k is the divergence
of two distributions of k + 1 outcomes, so it is not negative, 0 only where they agree on these, at most KL, and KL
itself for k = |vocabulary|.

Both have the same gradient, of the pruned model's logits z, with a target that is p, or p as far as it is known:

    d KL_k / d z_u = q_u - p_u  (u in S),     q_u - p_R q_u / q_R  (u in R)

Shapes: logits `[tokens, vocabulary]`; `tokens` are those of all sequences of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradprobe_hf.model.passes.loss import portions


class Predictions(Protocol):
    """What the dense model predicts for the tokens of a batch."""

    def compared(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence of some tokens `[rows]`, and what q is drawn towards `[rows, vocabulary]`.

        Args:
            log_q: logarithm of the pruned model's distribution, `[rows, vocabulary]`.
        """


@dataclass(frozen=True)
class WholePredictions:
    """All of them. Attributes: `logits` `[tokens, vocabulary]`."""

    logits: Tensor

    def compared(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        log_p = self.logits[rows].to(log_q).log_softmax(-1)
        p = log_p.exp()
        # A token that is masked in the model (a logit of -inf) would be 0 * (inf - inf).
        return torch.where(p > 0, p * (log_p - log_q), 0).sum(-1), p


@dataclass(frozen=True)
class TopPredictions:
    """The k most likely tokens, and the probability of all others together.

    Attributes:
        log_p: `[tokens, k]`.
        ids: of these tokens, `[tokens, k]`.
        log_rest: `[tokens]`; -inf where nothing is left.
    """

    log_p: Tensor
    ids: Tensor
    log_rest: Tensor

    @classmethod
    def of(cls, logits: Tensor, k: int) -> TopPredictions:
        """Those of a model's logits, in float32 at least."""
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        top, ids = log_p.topk(k, dim=-1)
        return cls(top, ids, log_p.scatter(-1, ids, -torch.inf).logsumexp(-1))

    def compared(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_p, log_rest = self.ids[rows].long(), self.log_p[rows].to(log_q), self.log_rest[rows].to(log_q)
        p, rest = log_p.exp(), log_rest.exp()
        outside = log_q.scatter(-1, ids, -torch.inf)
        log_q_rest = outside.logsumexp(-1)
        apart = torch.where(p > 0, p * (log_p - log_q.gather(-1, ids)), 0).sum(-1)
        together = torch.where(rest > 0, rest * (log_rest - log_q_rest), 0)
        # Where S is the whole vocabulary both are -inf, and there is no other token to draw anywhere.
        ratio = (log_rest - log_q_rest).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        towards = (outside + ratio[:, None]).exp()
        return apart + together, towards.scatter(-1, ids, p)


class SummedDivergence(torch.autograd.Function):
    """The divergence summed over the tokens that count, in float32 at least, a few tokens at a time.

    The gradient is made with the value, in the dtype of the logits: nothing else of their size is kept for backward,
    and the dense model's logits are gone before it begins.

    Shapes: logits z `[tokens, vocabulary]`, counted `[tokens]`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, predicted: Predictions, counted: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for rows in portions(logits):
            log_q = logits[rows].to(wide).log_softmax(-1)
            divergence, towards = predicted.compared(rows, log_q)
            total += divergence.masked_fill(~counted[rows], 0).sum()
            if gradient is not None:
                gradient[rows] = log_q.exp_().sub_(towards).masked_fill_(~counted[rows, None], 0)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale.to(gradient.dtype), None, None
