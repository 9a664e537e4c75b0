"""The keeper: masks of a model in training, one bit per weight (0.125 bytes), and what they are applied to.

Masks are bool `[out, in]`, True = pruned. Of a parameter that FSDP2 shards, this process keeps the masks of its own rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.model.fsdp import is_sharded, local, reshard
from gradprobe_hf.model.targets import Target, find_targets
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.selection.packed_masks import PackedMasks, zero_masked_

logger = logging.getLogger(__name__)

MaskSource = Mapping[str, Tensor] | PruneResult | Literal["from-zeros"]


class MaskKeeper:
    """Holds weights, and their gradients, at zero.

    Args:
        masks: by the name of the matrix; of a sharded model whole, or this process's part.
    """

    def __init__(self, model: nn.Module, targets: tuple[Target, ...], masks: Mapping[str, Tensor]) -> None:
        self.model = model
        self.targets = {target.name: target for target in targets if target.name in masks}
        self.masks = PackedMasks()
        for name, target in self.targets.items():
            device = local(model.get_parameter(target.parameter)).device
            if isinstance(masks, PackedMasks) and _is_own_part(model, target, masks):
                self.masks.add_packed(name, masks.packed(name).to(device), masks.columns(name))
            else:
                self.masks.add(name, [_own_part(model, target, masks[name]).to(device)])

    @property
    def nbytes(self) -> int:
        """Bytes that the masks take: one for eight weights."""
        return sum(self.masks.packed(name).nbytes for name in self.masks)

    @property
    def zeros(self) -> int:
        return sum(int(mask.sum()) for mask in self.masks.values())

    @torch.no_grad()
    def mask_weights(self) -> None:
        """Set the weights to zero, in place; copies nothing to the host."""
        reshard(self.model)  # a whole weight that FSDP still holds would hide what its shard is given
        for name, target in self.targets.items():
            zero_masked_(target.matrix(self.model), self.masks[name])

    def watch_gradients(self) -> list[RemovableHandle]:
        """Mask gradients as they are made: in the backward pass, before anything measures or reduces them.

        A parameter's hook runs when its gradient has been added, before DDP copies it; FSDP2 calls it on the shard.
        """
        return [
            parameter.register_post_accumulate_grad_hook(_Masking(self.masks, targets))
            for parameter, targets in self._by_parameter()
            if parameter.requires_grad
        ]

    def _by_parameter(self) -> Iterator[tuple[nn.Parameter, list[Target]]]:
        grouped: dict[str, list[Target]] = {}
        for target in self.targets.values():
            grouped.setdefault(target.parameter, []).append(target)
        for name, targets in grouped.items():
            yield self.model.get_parameter(name), targets

    def save(self, folder: Path) -> None:
        """Write the packed masks into a folder, a file for every process that has masks of its own."""
        processes = join_processes()
        if processes.is_main or is_sharded(self.model):
            tensors = {name: self.masks.packed(name).cpu().contiguous() for name in self.masks}
            save_file(tensors, folder / _file_name(self.model, processes))


def masks_of(model: nn.Module, source: MaskSource) -> tuple[tuple[Target, ...], Mapping[str, Tensor]]:
    """The matrices that are meant, and their masks.

    Raises:
        ValueError: names that the model does not have, or no zero anywhere.
    """
    targets = find_targets(model, include=["*"])
    if isinstance(source, PruneResult):
        source = source.masks
    if isinstance(source, str):
        if source != "from-zeros":
            raise ValueError(f"masks={source!r}: pass masks, a PruneResult, or 'from-zeros'.")
        return _zeros_of(model, targets)
    unknown = sorted(set(source) - {target.name for target in targets})
    if unknown or not source:
        raise ValueError(
            f"masks for {', '.join(unknown[:3]) or 'nothing'}: the model has matrices like {targets[0].name!r}. "
            "Pass the masks of this model, a PruneResult, or 'from-zeros'."
        )
    return tuple(target for target in targets if target.name in source), source


def load_masks(model: nn.Module, folder: Path) -> PackedMasks | None:
    """The masks that `MaskKeeper.save` wrote; None if there are none."""
    path = folder / _file_name(model, join_processes())
    if not path.exists():
        return None
    packed = load_file(path)
    masks = PackedMasks()
    for target in find_targets(model, include=["*"]):
        if target.name in packed:
            masks.add_packed(target.name, packed[target.name], target.region(model).shape[1])
    return masks


class _Masking:
    """A hook: the gradient of one parameter, masked in place."""

    def __init__(self, masks: PackedMasks, targets: list[Target]) -> None:
        self.masks, self.targets = masks, targets

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            for target in self.targets:
                zero_masked_(target.view(gradient), self.masks[target.name])


def _zeros_of(model: nn.Module, targets: tuple[Target, ...]) -> tuple[tuple[Target, ...], PackedMasks]:
    """The zeros that are there, of the matrices that have any; of a sharded one, in any process."""
    zeros = torch.tensor([int((target.matrix(model) == 0).sum()) for target in targets])
    if is_sharded(model):
        join_processes().sum_(zeros)
    counted = list(zip(targets, zeros.tolist(), strict=True))
    if not any(count for _, count in counted):
        raise ValueError(
            "masks='from-zeros', and no weight of the model is zero. Prune it first, or pass the masks "
            "(a PruneResult of prune_pretrained)."
        )
    for target, count in counted:
        if count == target.numel:
            logger.warning("%s is all zeros, and will stay so", target.name)
    found = tuple(target for target, count in counted if count)
    masks = PackedMasks()
    for target in found:
        masks.add(target.name, [target.matrix(model) == 0])
    return found, masks


def _is_own_part(model: nn.Module, target: Target, masks: PackedMasks) -> bool:
    return (len(masks.packed(target.name)), masks.columns(target.name)) == target.region(model).shape


def _own_part(model: nn.Module, target: Target, mask: Tensor) -> Tensor:
    """What of a mask belongs to this process.

    Raises:
        ValueError: it has another shape than the matrix.
    """
    region = target.region(model)
    if tuple(mask.shape) == region.shape:
        return mask.bool()
    if tuple(mask.shape) != target.shape:
        raise ValueError(f"the mask of {target.name} is {tuple(mask.shape)}, and the matrix {target.shape} [out, in].")
    return mask[region.rows, region.columns].bool()


def _file_name(model: nn.Module, processes: Processes) -> str:
    part = f"-{processes.rank + 1:05d}-of-{processes.count:05d}" if is_sharded(model) else ""
    return f"gradprobe_masks{part}.safetensors"
