"""The mask keeper: masks of a model in training, one bit per weight, applied to its weights and gradients.

Layout: a mask is bool `[out, in]`, True = pruned; that of a parameter with more dimensions `[out, ...]` (a convolution)
has the others side by side, `[out, in]` again. Under FSDP2 a process has shards of the parameters, which are some of
their rows, and keeps the masks of its shards alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.model.fsdp import is_sharded, local, reshard
from gradprobe_hf.model.targets import Target, every_matrix
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.selection.masked_values import zero_masked_
from gradprobe_hf.selection.packed_masks import PackedMasks

logger = logging.getLogger(__name__)

ROUNDED = 0.01  # of the weights: so many may have become zero in training by rounding
MaskSource = Mapping[str, Tensor] | PruneResult | Literal["from-zeros"]


class MaskKeeper:
    """Keeps pruned weights at zero, and their gradients.

    Args:
        model: in training, without wrappers.
        targets: matrices of the model; those without a mask are left out.
        masks: matrix name -> bool `[out, in]`, True = pruned. For a sharded model either the mask of the whole matrix,
            or of this process's shard.

    Attributes:
        masks: packed, on the device of their weights; for a sharded model the shards' own.
        targets: by name.

    Raises:
        ValueError: a mask with another shape than its matrix.
    """

    def __init__(self, model: nn.Module, targets: tuple[Target, ...], masks: Mapping[str, Tensor]) -> None:
        self.model = model
        self.targets = {target.name: target for target in targets if target.name in masks}
        self.masks = PackedMasks()
        for name, target in self.targets.items():
            device = local(model.get_parameter(target.parameter)).device
            if isinstance(masks, PackedMasks) and _is_local(model, target, masks):  # then no bit need be unpacked
                self.masks.add_packed(name, masks.packed(name).to(device), masks.columns(name))
            else:
                self.masks.add(name, [_local_mask(model, target, masks[name]).to(device)])

    @property
    def nbytes(self) -> int:
        """Memory of the masks in bytes: one for eight weights."""
        return sum(self.masks.packed(name).nbytes for name in self.masks)

    @property
    def zeros(self) -> int:
        """Pruned weights; of a sharded model those of this process."""
        return sum(int(mask.sum()) for mask in self.masks.values())

    @torch.no_grad()
    def mask_weights(self, among: Iterable[nn.Parameter] | None = None) -> None:
        """Set pruned weights to zero, in place. Nothing is copied to the host, so no device has to be waited for.

        Args:
            among: of these parameters alone; default: of all.
        """
        held = None if among is None else set(map(id, among))
        # FSDP may hold the gathered weight for the next forward pass, which would then not see zeros in the shard.
        reshard(self.model)
        for name, target in self.targets.items():
            if held is None or id(self.model.get_parameter(target.parameter)) in held:
                _zero_masked_(target.matrix(self.model), self.masks[name])

    def mask_gradients(self) -> None:
        """Set gradients of pruned weights to zero, in place.

        Hooks have done so already, unless a step has passes that a Trainer does not tell of: then they are gone with
        the first one's graph (pass_hooks.py).
        """
        for parameter, targets in self._by_parameter():
            _MaskGradient(self.masks, targets)(parameter)

    def nonzero(self) -> int:
        """Weights under the masks that are not zero; of a sharded model those of this process."""
        return sum(
            int(target.matrix(self.model).flatten(1)[self.masks[name]].count_nonzero())
            for name, target in self.targets.items()
        )

    def check_restored(self, folder: Path) -> None:
        """Raise ValueError if masks that were read from a checkpoint's folder are not those of the weights."""
        if count := self.nonzero():
            raise ValueError(
                f"the masks in {folder} are of other weights: {count:,} weights under them are not zero. Masks are "
                "read from output_dir, wherever the weights come from: resume from a checkpoint in output_dir. If it "
                "is there, its weights were not all loaded (Trainer leaves out fused experts of a mixture)."
            )

    def check_all_of(self, found: MaskKeeper, folder: Path) -> None:
        """Raise ValueError if weights were zero, by the masks that were found in them, under none of those of a folder.

        Masks of one model at two sparsities lie inside of each other, and no weight under the smaller ones tells. A few
        weights round to zero in training, and go on.
        """
        lost, weights = found.zeros - self.zeros, sum(target.numel for target in found.targets.values())
        if lost > ROUNDED * weights:
            raise ValueError(
                f"the masks in {folder} are of other weights: {lost:,} weights that are zero are not under them, and "
                "would train. Masks are read from output_dir, wherever the weights come from: resume from a checkpoint "
                "in output_dir."
            )

    def gradient_hooks(self) -> list[RemovableHandle]:
        """Register hooks that mask gradients as backward makes them, before they are reduced, clipped or logged."""
        # A post-accumulate hook sees the gradient that the optimizer will read. DDP copies it to its buckets only after
        # the hook, and FSDP2 calls the hook itself, with the reduced gradient of the shard. A hook of the tensor would
        # see neither the sum of accumulated passes nor, under FSDP2, a shard.
        return [
            parameter.register_post_accumulate_grad_hook(_MaskGradient(self.masks, targets))
            for parameter, targets in self._by_parameter()
            if parameter.requires_grad
        ]

    def _by_parameter(self) -> Iterator[tuple[nn.Parameter, list[Target]]]:
        """One hook for a parameter: fused experts are many matrices in one tensor."""
        grouped: dict[str, list[Target]] = {}
        for target in self.targets.values():
            grouped.setdefault(target.parameter, []).append(target)
        for name, targets in grouped.items():
            yield self.model.get_parameter(name), targets

    def save(self, folder: Path) -> None:
        """Write the packed masks into a folder: one file, or one for each process of a sharded model."""
        processes = join_processes()
        # Under DDP every process has the same masks, and one file serves all.
        if processes.is_main or is_sharded(self.model):
            tensors = {name: self.masks.packed(name).cpu().contiguous() for name in self.masks}
            save_file(tensors, folder / _file_name(self.model, processes))


def check_source(source: Any) -> None:
    """Raise ValueError for what cannot be masks."""
    if source != "from-zeros" and not isinstance(source, (Mapping, PruneResult)):
        raise ValueError(f"masks={source!r}: pass masks, a PruneResult, or 'from-zeros'.")
    for name, mask in source.items() if isinstance(source, Mapping) else ():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = f"{mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"masks[{name!r}] must be a bool tensor [out, in], True = pruned, got {kind}.")
    if isinstance(source, PruneResult) and not source.is_applied:
        raise ValueError(
            "this result was not applied (apply=False), and has more than masks: weights that were changed to make up "
            "for what goes, or structures that go whole. Save it and load the checkpoint, or prune with apply=True."
        )


def is_unlearned(target: Target, zeros: int) -> bool:
    """Whether it was made of zeros and has yet to learn, as position embeddings are, and nothing is to be kept."""
    return target.sites[0].kind == "other" and zeros == target.numel


def resolve_masks(model: nn.Module, source: MaskSource) -> tuple[tuple[Target, ...], Mapping[str, Tensor]]:
    """The matrices that have a mask, and their masks, of what a user passed as `masks`.

    Raises:
        ValueError: names that the model does not have, or `"from-zeros"` where no weight is zero.
    """
    targets = every_matrix(model)
    if isinstance(source, PruneResult):
        source = source.masks
    if isinstance(source, str):
        return _masks_from_zeros(model, targets)
    unknown = sorted(set(source) - {target.name for target in targets})
    if unknown or not source:
        raise ValueError(
            f"masks for {', '.join(unknown[:3]) or 'nothing'}: the model has matrices like {targets[0].name!r}. "
            "Pass the masks of this model, a PruneResult, or 'from-zeros'."
        )
    return tuple(target for target in targets if target.name in source), source


def load_masks(model: nn.Module, folder: Path) -> PackedMasks | None:
    """The masks that `MaskKeeper.save` wrote for this process; None if there is no such file."""
    path = folder / _file_name(model, join_processes())
    if not path.exists():
        return None
    packed = load_file(path)
    masks = PackedMasks()
    for target in every_matrix(model):
        if target.name in packed:
            masks.add_packed(target.name, packed[target.name], target.region(model).shape[1])
    return masks


class _MaskGradient:
    """Hook that masks the gradient of one parameter in place."""

    def __init__(self, masks: PackedMasks, targets: list[Target]) -> None:
        self.masks, self.targets = masks, targets

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter.grad.is_sparse:  # of nn.Embedding(sparse=True): the rows that were looked up
            (target,) = self.targets
            gradient = parameter.grad = parameter.grad.coalesce()
            _zero_masked_(gradient.values(), self.masks[target.name][gradient.indices()[0]])
            return
        gradient = local(parameter.grad)
        for target in self.targets:
            _zero_masked_(target.view(gradient), self.masks[target.name])


def _zero_masked_(values: Tensor, mask: Tensor) -> None:
    zero_masked_(values, mask.reshape(values.shape))


def _masks_from_zeros(model: nn.Module, targets: tuple[Target, ...]) -> tuple[tuple[Target, ...], PackedMasks]:
    """Masks of the weights that are zero, for the matrices that have any."""
    zeros = torch.tensor([int((target.matrix(model) == 0).sum()) for target in targets])
    if is_sharded(model):  # all processes keep the same matrices, though a shard of one may have no zero
        join_processes().sum_(zeros)
    counted = [(target, count) for target, count in zip(targets, zeros.tolist(), strict=True) if count]
    for target in (target for target, count in counted if is_unlearned(target, count)):
        logger.warning("%s is all zeros, as one that has yet to learn: it trains", target.name)
    counted = [(target, count) for target, count in counted if not is_unlearned(target, count)]
    if not counted:
        raise ValueError(
            "masks='from-zeros', and no weight of the model is zero. Prune it first, or pass the masks "
            "(a PruneResult of prune_pretrained)."
        )
    for target, count in counted:
        if count == target.numel:
            logger.warning("%s is all zeros and will stay so", target.name)
    masks = PackedMasks()
    for target, _ in counted:
        masks.add(target.name, [target.matrix(model).flatten(1) == 0])
    return tuple(target for target, _ in counted), masks


def _is_local(model: nn.Module, target: Target, masks: PackedMasks) -> bool:
    """Whether a mask has the shape of this process's shard (or of the matrix, without shards)."""
    return (len(masks.packed(target.name)), masks.columns(target.name)) == target.region(model).shape


def _local_mask(model: nn.Module, target: Target, mask: Tensor) -> Tensor:
    """The part of a mask for this process's shard."""
    region = target.region(model)
    mask = mask.flatten(1) if mask.ndim > 2 else mask
    if tuple(mask.shape) == region.shape:
        return mask.bool()
    if tuple(mask.shape) != target.shape:
        raise ValueError(f"the mask of {target.name} is {tuple(mask.shape)}, and the matrix {target.shape} [out, in].")
    return mask[region.rows, region.columns].bool()


def _file_name(model: nn.Module, processes: Processes) -> str:
    part = f"-{processes.rank + 1:05d}-of-{processes.count:05d}" if is_sharded(model) else ""
    return f"gradprobe_masks{part}.safetensors"
