"""Folding: inputs and output gradients of measured maps -> sums in the statistics, during one pass over the batches.

Everything is folded the moment backward reaches a matrix, so that no gradient outlives it. The exception are matrices
that are used more than once (tied weights): the gradient of a sequence is the sum over all uses, and it can be squared
only when the last of them is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.maps.sequence_gradients import embedding_gradients, linear_gradients
from gradprobe_hf.probe.matrix import ALL, MatrixStatistics
from gradprobe_hf.probe.padding import BatchLayout
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.runtime.row_chunks import FOLDED_ELEMENTS, row_chunks
from gradprobe_hf.runtime.stopwatch import return_free_memory
from gradprobe_hf.scores.terms import MARGINALS


class Folding:
    """Folds what measured maps see into `statistics`, batch by batch.

    Shapes below: x `[sequences, tokens, in]` (an embedding's ids: `[sequences, tokens]`), d `[sequences, tokens, out]`.

    Args:
        spike_limit: see `spikes.py`; 0: no limit, and energies are not recorded.
        first_sequence: how many sequences of this pass an earlier run has folded already.

    Attributes:
        moved: whether any gradient so far was not 0.
    """

    def __init__(
        self, statistics: Statistics, model: PreTrainedModel, spike_limit: float = 0.0, first_sequence: int = 0
    ) -> None:
        self.statistics, self.moved = statistics, False
        self._model, self._spike_limit, self._first_sequence = model, spike_limit, first_sequence
        self._layout = BatchLayout(sequences=0, tokens=0)
        self._counted = True
        self._recomputing = False
        self._uses: Counter[str] = Counter()  # of each matrix, in forward
        self._limited_uses: Counter[tuple[str, int]] = Counter()  # of each at each site, in backward
        self._unfinished: dict[str, list[Tensor]] = {}  # of a matrix with several uses, each sequence's gradient so far

    def start_batch(self, batch: Batch, counted: bool = True) -> None:
        """Args: counted: False for a batch that only keeps the collectives of a sharded model in step."""
        self._counted = counted
        self._first_sequence += self._layout.sequences
        self._layout = BatchLayout.of(batch, self._model)
        self._uses.clear()
        self._limited_uses.clear()

    def finish_batch(self) -> None:
        """Fold the matrices that were used more than once."""
        for name, gradients in self._unfinished.items():
            statistics = self.statistics[name]
            if statistics.shards is not None:
                statistics.add_gradients_to_shards(gradients)
            else:
                statistics.add_gradients(ALL, gradients)
        self._unfinished.clear()
        return_free_memory()

    def count_use(self, target: Target) -> None:
        """Call in every forward, so that backward knows whether a gradient is the only one of its matrix."""
        if not self._recomputing:
            self._uses[target.name] += 1

    @property
    def was_used(self) -> bool:
        """Whether the forward pass of this batch has used any of the matrices."""
        return bool(self._uses)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """For a forward that checkpointing repeats: it is the same use once more, not a further one."""
        self._recomputing = True
        return_free_memory()
        try:
            yield
        finally:
            self._recomputing = False

    def fold(self, target: Target, site: Site, inputs: Tensor, output_grad: Tensor) -> None:
        """Fold one use of a matrix into every term that its statistics have."""
        statistics = self.statistics[target.name]
        statistics.reached |= self._counted
        # A batch that does not count still takes part in the collectives of shards, with zeros; skipping the folding
        # here would leave the other processes waiting.
        output_grad = output_grad if self._counted else torch.zeros_like(output_grad)
        self._look_at(output_grad)
        d = self._layout.by_sequence(output_grad, 1, target.name)
        x = self._layout.by_sequence(inputs, int(site.kind != "embedding"), target.name)
        d = self._without_spikes(target, site, statistics, d)
        if statistics.folds_gradients:
            self._fold_gradients(target, site, statistics, x, d)
        if statistics.folds_tokens or MARGINALS in statistics.terms:
            # Widened before they are squared: small float16 gradients would vanish, and bfloat16 squares lose digits.
            self._fold_squares(target, site, statistics, x, d.to(statistics.dtype).square())

    def fold_inputs(self, target: Target, site: Site, inputs: Tensor) -> None:
        """Fold the inputs' marginal alone, in a forward pass."""
        if not self._counted:
            return
        statistics = self.statistics[target.name]
        statistics.reached = True
        x = self._layout.by_sequence(inputs, int(site.kind != "embedding"), target.name)
        x_sq = self._layout.input_squares(target, site, x, statistics.dtype)
        if site.kind == "embedding":
            statistics.marginals.add(0, target.sites.index(site), x_sq, 0.0)
        else:
            statistics.marginals.add(0, target.sites.index(site), 0.0, x_sq.sum((0, 1)))

    def fold_gates(
        self, target: Target, inputs: Tensor, input_grad: Tensor, bias: Tensor | None, output_grad: Tensor
    ) -> None:
        """Fold one use of a matrix into the sums of its units' gates: its inputs, `W^T d`, its bias and d."""
        if self._counted:
            self._look_at(input_grad)
            gates = self.statistics[target.name].gates
            x, gradient = (self._layout.by_sequence(value, 1, target.name) for value in (inputs, input_grad))
            offset = None
            if bias is not None and gates.is_whole:
                d = self._layout.by_sequence(output_grad, 1, target.name)
                offset = d.sum(1, dtype=gates.total.dtype) @ bias.to(gates.total.dtype)
            gates.add(x, gradient, offset)

    def _look_at(self, gradient: Tensor) -> None:
        # Each look waits for the device; behind the first gradient that is not 0, as a rule the first, there are none.
        self.moved = self.moved or bool(gradient.any())

    def _without_spikes(self, target: Target, site: Site, statistics: MatrixStatistics, d: Tensor) -> Tensor:
        """d, with the sequences that have exploded scaled down. In probe 0: record their energies."""
        if not (self._spike_limit and self._counted):
            return d
        # `dtype` widens within the reduction: a float16 sum of squares would overflow, and a copy of d take memory.
        energies = torch.linalg.vector_norm(d, dim=(1, 2), dtype=statistics.dtype).square()
        index = target.sites.index(site)
        use = index, self._limited_uses[target.name, index]
        self._limited_uses[target.name, index] += 1
        if self.statistics.probe == 0:
            statistics.energies.add(use, self._first_sequence, energies)
            return d
        scale = statistics.energies.scale(use, self._first_sequence, energies, self._spike_limit)
        return d * scale[:, None, None].to(d.dtype)

    def _fold_gradients(self, target: Target, site: Site, statistics: MatrixStatistics, x: Tensor, d: Tensor) -> None:
        """The terms of the gradients of sequences."""
        is_embedding, used_once = site.kind == "embedding", self._uses[target.name] <= 1
        if used_once and statistics.shards is None and not is_embedding:
            # Some rows of all sequences, not all rows of one: the accumulator's rows are decoded once a batch.
            for rows in row_chunks(target.shape, FOLDED_ELEMENTS):
                statistics.add_gradients(rows, linear_gradients(x, d[..., rows]))
            return
        gradients = embedding_gradients(x, d, target.shape) if is_embedding else linear_gradients(x, d)
        if not used_once:
            self._add_unfinished(target, gradients, statistics.dtype)
        elif statistics.shards is not None:
            statistics.add_gradients_to_shards(gradients)
        else:
            statistics.add_gradients(ALL, gradients)

    def _add_unfinished(self, target: Target, gradients: Iterator[Tensor], dtype: torch.dtype) -> None:
        # Here every sequence of the batch has a gradient `[out, in]` in memory. That is the price of tied weights: with
        # the embedding and the head of a model as one target it decides how large batches can be.
        if target.name in self._unfinished:
            for total, gradient in zip(self._unfinished[target.name], gradients, strict=True):
                total += gradient
        else:
            self._unfinished[target.name] = [gradient.to(dtype) for gradient in gradients]

    def _fold_squares(self, target: Target, site: Site, statistics: MatrixStatistics, x: Tensor, d_sq: Tensor) -> None:
        """The terms of the squares of tokens, and the marginals."""
        x_sq = self._layout.input_squares(target, site, x, statistics.dtype)
        is_embedding = site.kind == "embedding"
        if statistics.folds_tokens and is_embedding:
            statistics.add_tokens(x.flatten(), d_sq.flatten(0, 1))
        elif statistics.folds_tokens and statistics.shards is not None:
            statistics.add_products_to_shards(d_sq.flatten(0, 1), x_sq.flatten(0, 1))
        elif statistics.folds_tokens:
            for rows in row_chunks(target.shape, FOLDED_ELEMENTS):
                statistics.add_products(rows, d_sq[..., rows].flatten(0, 1), x_sq.flatten(0, 1))
        if MARGINALS in statistics.terms and self._counted:
            d_sum = d_sq.sum((0, 1))
            row_side, column_side = (x_sq, d_sum) if is_embedding else (d_sum, x_sq.sum((0, 1)))
            statistics.marginals.add(self.statistics.probe, target.sites.index(site), row_side, column_side)
