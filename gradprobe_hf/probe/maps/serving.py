"""Serving: the weight that a measured map multiplies with, in place of the one the model stores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradprobe_hf.model.targets import Target
from gradprobe_hf.runtime.row_chunks import CACHED_ELEMENTS, row_chunks
from gradprobe_hf.selection.packed_masks import multipliers_of


class ServedWeights:
    """Weights as a pass sees them: `W * factor` under a mask, `W` elsewhere, the model's own tensors untouched.

    Args:
        masks: target name -> bool `[out, in]`; a target without one is served as it is.
        factor: for the weights under a mask; 0 prunes them.
        new_weights: target name -> values `[out, in]` served in place of the model's.
        trained: whether autograd is to reach the new weights: maps are then plain products, and measure nothing.
    """

    def __init__(
        self,
        masks: Mapping[str, Tensor] | None = None,
        factor: float = 0.0,
        new_weights: Mapping[str, Tensor] | None = None,
        trained: bool = False,
    ) -> None:
        self.trained = trained
        self.masks = {} if masks is None else masks
        self.factor, self.new_weights = factor, {} if new_weights is None else new_weights
        self._scratch: dict[torch.dtype, Tensor] = {}  # as large as the largest matrix so far

    def of(self, target: Target, weight: Tensor) -> Tensor:
        """The weight to multiply with, `[out, in]`. Valid for one product only: the next call overwrites it."""
        if target.name in self.new_weights:
            weight = self.new_weights[target.name].to(weight.device, weight.dtype)
        if target.name not in self.masks:
            return weight
        served = self._scratch_for(weight)
        # On a CPU a few rows at a time: the multipliers that are unpacked from bits then never leave the cache.
        at_once = CACHED_ELEMENTS if weight.device.type == "cpu" else weight.numel()
        for rows in row_chunks(weight.shape, at_once):
            factors = multipliers_of(self.masks, target.name, rows, self.factor, weight.dtype, weight.device)
            torch.mul(weight[rows], factors, out=served[rows])
        return served

    def _scratch_for(self, weight: Tensor) -> Tensor:
        """Uninitialised memory with the shape and strides of `weight`."""
        if weight.device.type != "cpu":
            return torch.empty_like(weight)  # the caching allocator reuses memory by itself
        # A CPU tensor of this size is fresh from the kernel each time, and faulting its pages in costs more than the
        # multiplication. So one buffer for each dtype serves all matrices.
        scratch = self._scratch.get(weight.dtype)
        if scratch is None or scratch.numel() < weight.numel():
            self._scratch[weight.dtype] = scratch = torch.empty(weight.numel(), dtype=weight.dtype)
        # Strides too: a weight that is a transposed view stays one, and the product with it runs the same kernel.
        strides = torch.empty_like(weight, device="meta").stride()
        return scratch.as_strided(weight.shape, strides)
