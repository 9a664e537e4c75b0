"""Folding: what measured maps serve and fold into during one pass over the batches.

Sequences are told apart by position: an input `[sequences, ...]`, or `[sequences * tokens, in]` where a model flattens
(OPT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.model.families import in_decoder
from gradprobe_hf.model.loss import IGNORED, Batch
from gradprobe_hf.model.targets import Site, Target
from gradprobe_hf.probe.matrix import ALL, MatrixStatistics
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.runtime.row_chunks import CACHED_ELEMENTS, FOLDED_ELEMENTS, row_chunks
from gradprobe_hf.runtime.stopwatch import return_free_memory
from gradprobe_hf.selection.packed_masks import multipliers_of


class Probe:
    """What measured maps serve and fold into, during one pass over the batches."""

    def __init__(
        self,
        statistics: Statistics | None = None,
        shrunk: Mapping[str, Tensor] | None = None,
        factor: float = 1.0,
        has_encoder: bool = False,
        replaced: Mapping[str, Tensor] | None = None,
        spike_limit: float = 0.0,
        begun: int = 0,
    ) -> None:
        """
        Args:
            replaced: values `[out, in]` that are served in place of a matrix's own.
            spike_limit: of the energy of a sequence's gradient, in its energy in probe 0; 0: none.
            begun: sequences of this pass that were folded in an earlier run.
        """
        self.statistics, self.shrunk, self.factor, self.replaced = statistics, shrunk, factor, replaced or {}
        self._spike_limit, self._first, self._sequences = spike_limit, begun, 0
        self._has_encoder = has_encoder  # decoder-only OPT calls its blocks `decoder` too
        self._recomputing = False
        self._uses: Counter[str] = Counter()
        self._unfinished: dict[str, list[Tensor]] = {}
        self._room: dict[torch.dtype, Tensor] = {}  # for what is served, as large as the largest matrix so far

    def start_batch(self, batch: Batch, counted: bool = True) -> None:
        """Args: counted: False for a batch that only keeps the collectives of a sharded model in step."""
        self._counted = counted
        self._first += self._sequences  # the number of the batch's first sequence
        self._sequences = row_count(batch)
        ids = batch.get("input_ids")
        self._tokens = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim > 1 else 1
        self._masks = padding_masks(batch)
        self._uses.clear()

    def finish_batch(self) -> None:
        """Fold the matrices used more than once: a sequence's gradient is the sum over all uses, squared after it."""
        for name, gradients in self._unfinished.items():
            statistics = self._of(name)
            if statistics.layout is not None:
                statistics.add_shared_gradients(gradients)
            else:
                statistics.add_gradients(ALL, gradients)
        self._unfinished.clear()
        return_free_memory()

    def count_use(self, target: Target) -> None:
        if not self._recomputing:
            self._uses[target.name] += 1

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """For the forward passes that checkpointing repeats: they use no matrix once more."""
        self._recomputing = True
        return_free_memory()
        try:
            yield
        finally:
            self._recomputing = False

    def served(self, target: Target, weight: Tensor) -> Tensor:
        """The weight, with the candidates multiplied by the factor.

        On a CPU some rows are worked on at a time, so that what is between the bits and the result stays in the cache,
        and the result is written where the last one was: it is for one product, and must not be kept.
        """
        if target.name in self.replaced:
            weight = self.replaced[target.name].to(weight.device, weight.dtype)
        if self.shrunk is None or target.name not in self.shrunk:
            return weight
        served = self._room_for(weight)
        at_once = CACHED_ELEMENTS if weight.device.type == "cpu" else weight.numel()
        for rows in row_chunks(weight.shape, at_once):
            factors = multipliers_of(self.shrunk, target.name, rows, self.factor, weight.dtype, weight.device)
            torch.mul(weight[rows], factors, out=served[rows])
        return served

    def _room_for(self, weight: Tensor) -> Tensor:
        """Uninitialised, of the shape and layout of a weight. Fresh pages of a CPU cost more than what is written."""
        if weight.device.type != "cpu":
            return torch.empty_like(weight)
        room = self._room.get(weight.dtype)
        if room is None or room.numel() < weight.numel():
            self._room[weight.dtype] = room = torch.empty(weight.numel(), dtype=weight.dtype)
        strides = torch.empty_like(weight, device="meta").stride()
        return room.as_strided(weight.shape, strides)

    def fold(self, target: Target, site: Site, inputs: Tensor, output_grad: Tensor) -> None:
        if self.statistics is None:  # it only serves
            return
        statistics = self._of(target.name)
        statistics.reached |= self._counted
        output_grad = output_grad if self._counted else torch.zeros_like(output_grad)
        d = self._by_sequence(output_grad, output_grad.ndim - 1, target)
        x = self._by_sequence(inputs, inputs.ndim - (site.kind != "embedding"), target)
        d = self._limited(target, site, statistics, d)
        if statistics.terms & {"sequence", "peak"}:
            self._fold_gradients(target, site, statistics, x, d)
        if statistics.terms & {"token", "marginals"}:
            self._fold_squares(target, site, statistics, x, d.to(statistics.dtype).square())

    def _limited(self, target: Target, site: Site, statistics: MatrixStatistics, d: Tensor) -> Tensor:
        """The output gradients `[sequences, tokens, out]`, those of a sequence that has exploded scaled down.

        In a model that is shrunk half to death one sequence in many has a gradient that grows from block to block, up
        to a hundred thousand times the others: sums of squares would then be about this sequence alone.
        """
        if not (self._spike_limit and self._counted and self.statistics):
            return d
        energies = torch.linalg.vector_norm(d, dim=(1, 2), dtype=statistics.dtype).square()
        index = target.sites.index(site)
        if self.statistics.probe == 0:
            statistics.keep_energies(index, self._first, energies)
            return d
        factor = statistics.limiting(index, self._first, energies, self._spike_limit)
        return d * factor[:, None, None].to(d.dtype)

    def fold_inputs(self, target: Target, site: Site, inputs: Tensor) -> None:
        """The inputs' marginal alone, from a forward pass."""
        if not self._counted:
            return
        statistics = self._of(target.name)
        statistics.reached = True
        x = self._by_sequence(inputs, inputs.ndim - (site.kind != "embedding"), target)
        x_sq = self._input_squares(x, site, target, statistics.dtype)
        if site.kind == "embedding":
            statistics.add_marginals(0, target.sites.index(site), site.kind, x_sq, 0.0)
        else:
            statistics.add_marginals(0, target.sites.index(site), site.kind, 0.0, x_sq.sum((0, 1)))

    def tokens(self, target: Target, site: Site, inputs: Tensor) -> Tensor:
        """The inputs of a linear map without padding, `[tokens, in]`, in float32 at least."""
        x = self._by_sequence(inputs, inputs.ndim - 1, target)
        keep = self._kept_tokens(site, x)
        return (x.flatten(0, 1) if keep is None else x[keep.bool()]).to(torch.promote_types(x.dtype, torch.float32))

    def _fold_gradients(self, target: Target, site: Site, statistics: MatrixStatistics, x: Tensor, d: Tensor) -> None:
        embedding = site.kind == "embedding"
        if self._uses[target.name] <= 1:
            if statistics.layout is not None:
                gradients = _embedding_gradients(x, d, target) if embedding else _linear_gradients(x, d)
                statistics.add_shared_gradients(gradients)
            elif embedding:
                statistics.add_gradients(ALL, _embedding_gradients(x, d, target))
            else:
                for rows in row_chunks(target.shape, FOLDED_ELEMENTS):
                    statistics.add_gradients(rows, _linear_gradients(x, d[..., rows]))
            return
        gradients = _embedding_gradients(x, d, target) if embedding else _linear_gradients(x, d)
        if target.name in self._unfinished:
            for kept, gradient in zip(self._unfinished[target.name], gradients, strict=True):
                kept += gradient
        else:
            self._unfinished[target.name] = [gradient.to(statistics.dtype) for gradient in gradients]

    def _fold_squares(self, target: Target, site: Site, statistics: MatrixStatistics, x: Tensor, d_sq: Tensor) -> None:
        x_sq = self._input_squares(x, site, target, statistics.dtype)
        index, probe = target.sites.index(site), self.statistics.probe if self.statistics else 0
        if site.kind == "embedding":
            if "token" in statistics.terms:
                statistics.add_tokens(x.flatten(), d_sq.flatten(0, 1))
            if "marginals" in statistics.terms and self._counted:
                statistics.add_marginals(probe, index, site.kind, x_sq, d_sq.sum((0, 1)))
            return
        if "token" in statistics.terms and statistics.layout is not None:
            statistics.add_shared_products(d_sq.flatten(0, 1), x_sq.flatten(0, 1))
        elif "token" in statistics.terms:
            for rows in row_chunks(target.shape, FOLDED_ELEMENTS):
                statistics.add_products(rows, d_sq[..., rows].flatten(0, 1), x_sq.flatten(0, 1))
        if "marginals" in statistics.terms and self._counted:
            statistics.add_marginals(probe, index, site.kind, d_sq.sum((0, 1)), x_sq.sum((0, 1)))

    def _input_squares(self, x: Tensor, site: Site, target: Target, dtype: torch.dtype) -> Tensor:
        """x^2 with padding at zero, `[sequences, tokens, in]`; for an embedding how often each token occurs."""
        keep = self._kept_tokens(site, x)
        if site.kind == "embedding":
            weights = torch.ones_like(x, dtype=dtype) if keep is None else keep.to(dtype)
            counts = torch.zeros(target.shape[0], dtype=dtype, device=x.device)
            return counts.index_add_(0, x.flatten(), weights.flatten())
        x_sq = x.to(dtype).square()
        return x_sq if keep is None else x_sq * keep[..., None]

    def _kept_tokens(self, site: Site, x: Tensor) -> Tensor | None:
        """Which of `x [sequences, tokens, ...]` are no padding, `[sequences, tokens]`; None: all."""
        keep = self._masks["decoder" if self._has_encoder and in_decoder(site.module) else "encoder"]
        return None if keep is None or keep.shape != x.shape[:2] else keep.to(x.device)

    def _by_sequence(self, value: Tensor, leading: int, target: Target) -> Tensor:
        """`[sequences, tokens, ...]` from whatever shape the module was called with."""
        features = value.shape[leading:]
        lead = value.shape[:leading]
        known = (
            self._sequences == 1
            or (leading >= 2 and lead[0] == self._sequences)
            or (leading == 1 and lead[0] in (self._sequences, self._sequences * self._tokens))
        )
        if not known:
            raise ValueError(
                f"{target.name} is used on a tensor of shape {tuple(value.shape)}, in which the {self._sequences} "
                "sequences of the batch cannot be told apart; set batch_size=1 (or give batches of one row)."
            )
        return value.reshape(self._sequences, -1, *features)

    def _of(self, name: str) -> MatrixStatistics:
        assert self.statistics is not None, "a probe without statistics serves, it does not fold"
        return self.statistics[name]


def padding_masks(batch: Batch) -> dict[str, Tensor | None]:
    """Which tokens count, `[sequences, tokens]`, for the inputs and for what a decoder makes of the labels."""
    inputs, labels = batch.get("attention_mask"), batch.get("labels")
    decoder = batch.get("decoder_attention_mask")
    if decoder is None and isinstance(labels, Tensor) and labels.ndim == 2:
        decoder = labels != IGNORED
    return {
        "encoder": inputs if isinstance(inputs, Tensor) and inputs.ndim == 2 else None,
        "decoder": decoder,
    }


def _linear_gradients(x: Tensor, d: Tensor) -> Iterator[Tensor]:
    """The weight's gradient `[out, in]` of each sequence in turn: one at a time, so that only one is alive.

    float16 would overflow at 65,504, which a summed loss reaches; bfloat16 has float32's range.
    """
    for x_s, d_s in zip(x, d, strict=True):
        yield d_s.float().t() @ x_s.float() if d_s.dtype == torch.float16 else d_s.t() @ x_s


def _embedding_gradients(ids: Tensor, d: Tensor, target: Target) -> Iterator[Tensor]:
    """A token's rows are summed in float32 at least: a frequent token has thousands."""
    dtype = torch.promote_types(d.dtype, torch.float32)
    for ids_s, d_s in zip(ids, d, strict=True):
        yield torch.zeros(target.shape, dtype=dtype, device=d.device).index_add_(0, ids_s, d_s.to(dtype))
