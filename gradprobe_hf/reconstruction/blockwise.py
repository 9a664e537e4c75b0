"""Reconstruction: the kept weights of each matrix make up for those that go, block by block.

Each block sees the calibration text as the model pruned and reconstructed so far hands it on, `x`, `[tokens, in]`. What
is collected for a matrix is `H = sum_t x_t x_t^T`, `[in, in]`, over the tokens that are no padding; only one block's
are there at a time. The outputs `W x` are then kept by the sweep of `obs.py`, or by `least_squares.py`, which may also
choose again which weights go.

The blocks before have not kept theirs exactly, so `W x` is not what the dense model computes, `W x'`. With
`D = sum_t (x'_t - x_t) x_t^T` the least-squares weights for the dense outputs are `W + W D (H + damping)^-1`; what is
kept are outputs a share, `dense_target`, of the way to those. All of the way does worse than none: every matrix of a
block then makes up for the same error of the residual stream. (GPTAQ, arXiv:2504.02692, calibrates quantisation so.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.model.block_cache import BlockOutputCache, blocks_in_order
from gradprobe_hf.model.parameters import execution_device, is_offloaded
from gradprobe_hf.model.targets import Site, Target, is_routed
from gradprobe_hf.probe.attachment import instrumented
from gradprobe_hf.probe.engine import own_steps
from gradprobe_hf.probe.folding import Probe
from gradprobe_hf.reconstruction.least_squares import LeastSquares, Projection, in_groups, in_matrix, in_rows
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.reconstruction.sweep import (
    COLUMNS,
    Choose,
    by_group_saliency,
    by_saliency,
    fixed,
    inverse_factor,
    sweep,
)
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import return_free_memory
from gradprobe_hf.selection.packed_masks import PackedMasks


@dataclass(frozen=True)
class Reconstruction:
    """Attributes: `masks` of the weights that are zero; `updates`, the new values of every matrix; `damping` where
    more than was asked for was needed, by matrix."""

    masks: PackedMasks
    updates: NewWeights
    damping: dict[str, float]


@torch.no_grad()
def reconstruct(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batches: Batches,
    masks: PackedMasks | None,
    config: GradProbeConfig,
    *,
    row_fisher: Mapping[str, Sequence[float]] | None = None,
    folder: str | Path | None = None,
    processes: Processes | None = None,
    progress: bool = True,
) -> Reconstruction:
    """New weights of every target; the model is left as it was.

    Args:
        masks: which weights go; None: the sweep chooses them, as SparseGPT does. `reconstruction="admm"` only starts
            there, and keeps the budgets: of groups, of rows (scope "row"), or else of matrices.
        row_fisher: of each matrix, the mean Fisher information of the weights of a row, `[out]`: what rows compete
            with where a budget is a matrix's.
        folder: for the new weights of a model that is offloaded.
        processes: who shares the batches; all get the same weights.

    Raises:
        ValueError: blocks that cannot be run one after the other, or inputs that are not finite.
    """
    processes = processes or Processes()
    own = [batch for batch, _ in own_steps(model, targets, batches, processes)]
    order = blocks_in_order(model, targets, own[0])
    prefix = BlockOutputCache(model, own, len(order))
    dense = BlockOutputCache(model, own, len(order)) if config.dense_target else None
    found = Reconstruction(PackedMasks(), NewWeights(folder, on_disk=is_offloaded(model)), {})
    for block in tqdm(order, desc="reconstruction", unit="block", disable=not progress):
        inside = [target for target in targets if target.block == block]
        collected = _Collected(model, processes, has_drift=dense is not None)
        left = []
        with instrumented(model, inside, collected.probe, on_input=collected.add):
            for number in range(len(own)):
                if dense is not None:
                    with collected.as_dense():
                        left.append(dense.run(number, block, collected.probe.start_batch))
                prefix.run(number, block, collected.probe.start_batch)
        for target in inside:
            _update(model, target, collected, masks, (row_fisher or {}).get(target.name), config, found)
        del collected
        return_free_memory()
        with instrumented(model, inside, Probe(replaced=found.updates)):
            prefix.advance([block])
        if dense is not None:
            dense.finish([block], left)
    return found


def reconstruction_passes(config: GradProbeConfig) -> int:
    """Forward passes over the calibration data: each block for H, for what it hands on, and maybe as it was."""
    return 3 if config.dense_target else 2


def _update(
    model: PreTrainedModel,
    target: Target,
    collected: _Collected,
    masks: PackedMasks | None,
    row_fisher: Sequence[float] | None,
    config: GradProbeConfig,
    found: Reconstruction,
) -> None:
    hessian, drift = collected.of(target)
    stored = target.matrix(model)
    weight, share = stored.to(hessian.device, hessian.dtype), config.dense_target or 0.0
    mask = None if masks is None else masks[target.name].to(weight.device)
    if mask is None or not config.solves_least_squares:
        choose, at_once = _choice(mask, config)
        factor, damping = inverse_factor(hessian, config.damping)
        start = weight if drift is None else weight + share * (weight @ drift @ factor.t() @ factor)
        values, mask = sweep(start, factor, choose, at_once)
        if damping > config.damping:
            found.damping[target.name] = damping
    if config.solves_least_squares:
        problem = LeastSquares(weight, hessian, drift, share, config.damping)
        if config.reconstruction == "admm":
            fisher = None if row_fisher is None else torch.tensor(row_fisher, dtype=weight.dtype, device=weight.device)
            mask = problem.revised(mask, _cut(mask, fisher, config))
        values = problem.solved(mask)
    found.updates.add(target.name, values.to(stored.device, stored.dtype))
    found.masks.add(target.name, [mask])


class _Collected:
    """H and D of each matrix of a block, `[in, in]`, float32 (float64 for a float64 model)."""

    def __init__(self, model: PreTrainedModel, processes: Processes, has_drift: bool) -> None:
        self.probe = Probe(has_encoder=model.config.is_encoder_decoder)
        self._model, self._processes, self._has_drift = model, processes, has_drift
        self._hessians: dict[str, Tensor] = {}
        self._drifts: dict[str, Tensor] = {}
        self._dense: dict[str, list[Tensor]] = {}  # of one batch, in the order in which they are used
        self._is_dense = False
        self._before: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, Tensor, Tensor | None] | None = None

    @contextmanager
    def as_dense(self) -> Iterator[None]:
        """What is added in the body are the dense model's inputs, of the batch that is added after it."""
        self._dense.clear()
        self._is_dense = True
        try:
            yield
        finally:
            self._is_dense, self._before, self._last = False, None, None

    def add(self, target: Target, site: Site, inputs: Tensor) -> None:
        if self._is_dense:
            if not self._is_compared(target):
                return
            if self._before is None or self._before[0] is not inputs:
                self._before = inputs, self.probe.tokens(target, site, inputs)
            self._dense.setdefault(target.name, []).append(self._before[1])
            return
        others = self._dense.get(target.name)
        other = others.pop(0) if others else None
        known = self._last  # queries, keys and values are given one and the same
        if known is None or known[0] is not inputs or (known[2] is None) != (other is None):
            x = self.probe.tokens(target, site, inputs)
            self._last = known = inputs, x.t() @ x, None if other is None else (other - x).t() @ x
        _add(self._hessians, target.name, known[1])
        if known[2] is not None:
            _add(self._drifts, target.name, known[2])

    def of(self, target: Target) -> tuple[Tensor, Tensor | None]:
        """Over the tokens of all processes. Collectives."""
        self._last = None
        self._dense.clear()
        hessian = self._sum(self._hessians, target)
        if not torch.isfinite(hessian).all():
            raise ValueError(
                f"the inputs of {target.name} are not finite: look for NaN in the weights before it, or a dtype that "
                "overflows (float16: try bfloat16). Nothing was changed."
            )
        return hessian, self._sum(self._drifts, target) if self._is_compared(target) else None

    def _is_compared(self, target: Target) -> bool:
        """With the dense model's inputs: not an expert, which is sent other tokens there, unless it is sent all."""
        return self._has_drift and (not is_routed([target]) or "shared" in target.name)

    def _sum(self, sums: dict[str, Tensor], target: Target) -> Tensor:
        found = sums.pop(target.name, None)
        if found is None:  # an expert that was sent nothing here, or a process without such a batch
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            device = execution_device(self._model, target.parameter)
            found = torch.zeros(target.shape[1], target.shape[1], dtype=dtype, device=device)
        return self._processes.sum_(found)


def _add(sums: dict[str, Tensor], name: str, more: Tensor) -> None:
    if name in sums:
        sums[name] += more
    else:
        sums[name] = more.clone()  # `more` is that of several matrices, and the processes sum in place


def _choice(mask: Tensor | None, config: GradProbeConfig) -> tuple[Choose, int]:
    if mask is not None:
        return fixed(mask), COLUMNS
    if config.group is not None:
        return by_group_saliency(*config.group), config.group[1]
    assert config.sparsity is not None, "resolved by the configuration"
    return by_saliency(config.sparsity), COLUMNS


def _cut(mask: Tensor, fisher: Tensor | None, config: GradProbeConfig) -> Projection:
    if config.group is not None:
        return in_groups(*config.group)
    return in_rows(mask) if config.decision_scope == "row" else in_matrix(mask, fisher)
