"""Reconstruction: the kept weights of each matrix make up for those that go, block by block.

Each block sees the calibration text as the model pruned and reconstructed so far hands it on. What is collected for a
matrix is `H = sum_t x_t x_t^T`, `[in, in]`, over the tokens that are no padding; only one block's are there at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.blocks import Prefix, blocks_in_order
from gradprobe_hf.calibration import Batches
from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.masks import Masks
from gradprobe_hf.obs import COLUMNS, Choose, by_group_saliency, by_saliency, fixed, inverse_factor, sweep
from gradprobe_hf.probe import Probe, attached, own_steps
from gradprobe_hf.processes import Processes
from gradprobe_hf.stopwatch import return_free_memory
from gradprobe_hf.targets import Site, Target
from gradprobe_hf.updates import Updates
from gradprobe_hf.weights import execution_device, is_offloaded


@dataclass(frozen=True)
class Reconstruction:
    """Attributes: `masks` of the weights that are zero; `updates`, the new values of every matrix; `damping` where
    more than was asked for was needed, by matrix."""

    masks: Masks
    updates: Updates
    damping: dict[str, float]


@torch.no_grad()
def reconstruct(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batches: Batches,
    masks: Masks | None,
    config: GradProbeConfig,
    *,
    folder: str | Path | None = None,
    processes: Processes | None = None,
    progress: bool = True,
) -> Reconstruction:
    """New weights of every target; the model is left as it was.

    Args:
        masks: which weights go; None: the sweep chooses them, as SparseGPT does.
        folder: for the new weights of a model that is offloaded.
        processes: who shares the batches; all get the same weights.

    Raises:
        ValueError: blocks that cannot be run one after the other, or inputs that are not finite.
    """
    processes = processes or Processes()
    own = [batch for batch, _ in own_steps(model, targets, batches, processes)]
    order = blocks_in_order(model, targets, own[0])
    prefix = Prefix(model, own, len(order))
    found = Reconstruction(Masks(), Updates(folder, on_disk=is_offloaded(model)), {})
    for block in tqdm(order, desc="reconstruction", unit="block", disable=not progress):
        inside = [target for target in targets if target.block == block]
        collected = _Hessians(model, processes)
        with attached(model, inside, collected.probe, on_input=collected.add):
            prefix.run(block, collected.probe.start_batch)
        for target in inside:
            _update(model, target, collected, masks, config, found)
        del collected
        return_free_memory()
        with attached(model, inside, Probe(replaced=found.updates)):
            prefix.advance([block])
    return found


def _update(
    model: PreTrainedModel,
    target: Target,
    collected: _Hessians,
    masks: Masks | None,
    config: GradProbeConfig,
    found: Reconstruction,
) -> None:
    weight = target.matrix(model)
    choose, at_once = _choice(masks, target, config)
    factor, damping = inverse_factor(collected.of(target), config.damping)
    values, mask = sweep(weight.to(factor.device), factor, choose, at_once)
    found.updates.add(target.name, values.to(weight.device))
    found.masks.add(target.name, [mask])
    if damping > config.damping:
        found.damping[target.name] = damping


class _Hessians:
    """H of each matrix of a block, `[in, in]`, float32 (float64 for a float64 model)."""

    def __init__(self, model: PreTrainedModel, processes: Processes) -> None:
        self.probe = Probe(has_encoder=model.config.is_encoder_decoder)
        self._model, self._processes = model, processes
        self._of: dict[str, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def add(self, target: Target, site: Site, inputs: Tensor) -> None:
        if self._last is None or self._last[0] is not inputs:  # queries, keys and values are given one and the same
            x = self.probe.tokens(target, site, inputs)
            self._last = inputs, x.t() @ x
        product = self._last[1]
        self._of[target.name] = self._of[target.name] + product if target.name in self._of else product

    def of(self, target: Target) -> Tensor:
        """Over the tokens of all processes. A collective."""
        self._last = None
        found = self._of.pop(target.name, None)
        if found is None:  # an expert that was sent nothing here
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            device = execution_device(self._model, target.parameter)
            found = torch.zeros(target.shape[1], target.shape[1], dtype=dtype, device=device)
        found = self._processes.sum_(found)
        if not torch.isfinite(found).all():
            raise ValueError(
                f"the inputs of {target.name} are not finite: look for NaN in the weights before it, or a dtype that "
                "overflows (float16: try bfloat16). Nothing was changed."
            )
        return found


def _choice(masks: Masks | None, target: Target, config: GradProbeConfig) -> tuple[Choose, int]:
    if masks is not None:
        return fixed(masks[target.name]), COLUMNS
    if config.group is not None:
        return by_group_saliency(*config.group), config.group[1]
    assert config.sparsity is not None, "resolved by the configuration"
    return by_saliency(config.sparsity), COLUMNS
