"""LoRA on a pruned model: adapters that merge without losing a zero.

A low-rank product B A has no zeros of its own, so that adding it to a pruned weight fills every one. Two ways out:
`merge_with_masks` lets go of what the product has under the mask, and says how much of the update that was; and
`masked_adapters` trains with the masked product, so that there is nothing to let go of at a merge inside of its `with`.

Layout: matrices `[out, in]`; a LoRA layer adds `scaling * B A`, `[out, in]` (of a `Conv1D`, `[in, out]`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradprobe_hf.checkpoint.result import PruneResult

AdapterMasks = Mapping[str, Tensor] | PruneResult | Literal["from-zeros"]


@dataclass(frozen=True)
class MergeReport:
    """What merging adapters into a pruned model kept and lost.

    Attributes:
        sparsity: fraction of zeros in each matrix that had an adapter, after the merge.
        lost: the norm of what the mask took of each matrix's update, over the norm of the update; 0 is nothing.
        lost_in_all: the same of all matrices together.
    """

    sparsity: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    lost_in_all: float = 0.0

    def __str__(self) -> str:
        return (
            f"merged {len(self.lost)} matrices, every zero kept: the masks took {self.lost_in_all:.1%} of the norm of "
            "the update"
        )


@torch.no_grad()
def merge_with_masks(model: Any, masks: AdapterMasks = "from-zeros") -> tuple[nn.Module, MergeReport]:
    """Merge the active adapters of a PEFT model into its weights, and set what was pruned to zero again.

    Args:
        model: a `PeftModel` with LoRA adapters. It is used up, as by `merge_and_unload`.
        masks: matrix name (in the model without adapters) -> bool `[out, in]`, True = pruned; a `PruneResult`; or
            `"from-zeros"`, the zeros that the weights under the adapters have. Those of matrices without a mask are
            kept too.

    Returns:
        The model without adapters, and what the merge cost.

    Raises:
        ValueError: no LoRA adapters, or masks that fit nothing.
    """
    layers = _layers(model)
    masks = _masks(layers, masks)
    squares = {
        name: _squares(_update(layer), None if _is_masked(layer) else masks[name]) for name, layer in layers.items()
    }
    merged = model.merge_and_unload()
    sparsity = {}
    for name, layer in layers.items():
        weight = merged.get_parameter(name)
        matrix = weight.t() if layer.fan_in_fan_out else weight
        matrix.masked_fill_(masks[name].to(weight.device), 0)
        sparsity[name] = float((weight == 0).sum()) / weight.numel()
    under, whole = (sum(column) for column in zip(*squares.values(), strict=True))
    return merged, MergeReport(sparsity, {name: _share(*both) for name, both in squares.items()}, _share(under, whole))


@contextmanager
def masked_adapters(model: Any, masks: AdapterMasks = "from-zeros") -> Iterator[None]:
    """Use, and train, only what the adapters' products have outside of the masks, for the body of the `with`.

    Costs a product as large as the weight's own in every layer with an adapter, where LoRA alone costs next to nothing.

    Raises:
        ValueError: an adapter has dropout, which a product of matrices cannot have.
    """
    layers = _layers(model)
    masks = _masks(layers, masks)
    for name, layer in layers.items():
        if any(isinstance(layer.lora_dropout[adapter], nn.Dropout) for adapter in _active(layer)):
            raise ValueError(
                f"the adapter of {name} has dropout between its input and A, so that B A is not what it adds. Make it "
                "with LoraConfig(lora_dropout=0.0)."
            )
    handles = [layer.register_forward_hook(_Taking(masks[name])) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Taking:
    """A hook: takes from a LoRA layer's output what its product added under the mask."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, layer: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        if layer.merged or layer.disable_adapters:
            return output
        under = _update(layer).where(self.mask.to(output.device), 0)
        return output - F.linear(arguments[0].to(under.dtype), under).to(output.dtype)


def _layers(model: Any) -> dict[str, Any]:
    """Weight name, as it is without adapters -> the LoRA layer around it."""
    try:
        from peft.tuners.lora import Linear
    except ImportError as error:
        raise ImportError("LoRA needs PEFT: pip install 'gradprobe_hf[peft]'") from error
    found = {
        name.removeprefix("base_model.model.") + ".weight": module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and _active(module)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no active LoRA adapter of a linear layer. Pass the PeftModel, before "
            "merge_and_unload."
        )
    return found


def _is_masked(layer: Any) -> bool:
    return any(isinstance(hook, _Taking) for hook in layer._forward_hooks.values())


def _squares(update: Tensor, mask: Tensor | None) -> tuple[float, float]:
    """The squared norm of what lies under the mask, and of all."""
    whole = float(update.double().square().sum())
    return (0.0 if mask is None else float(update[mask.to(update.device)].double().square().sum())), whole


def _share(under: float, whole: float) -> float:
    return math.sqrt(under / whole) if whole else 0.0


def _active(layer: Any) -> list[str]:
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def _update(layer: Any) -> Tensor:
    """What the active adapters add to the matrix `[out, in]`; autograd goes through it."""
    total = sum(layer.get_delta_weight(adapter) for adapter in _active(layer))
    assert isinstance(total, Tensor), "there is an active adapter"
    return total.t() if layer.fan_in_fan_out else total


def _masks(layers: Mapping[str, Any], source: AdapterMasks) -> dict[str, Tensor]:
    """A mask for every matrix with an adapter: the one that is given, or else its zeros."""
    weights = {name: layer.get_base_layer().weight for name, layer in layers.items()}
    masks = {name: (w.t() if layers[name].fan_in_fan_out else w) == 0 for name, w in weights.items()}
    if isinstance(source, PruneResult):
        source = source.masks
    if isinstance(source, str):
        if source != "from-zeros":
            raise ValueError(f"masks={source!r}: pass masks, a PruneResult, or 'from-zeros'.")
        return masks
    given = {name: source[name] for name in layers if name in source}
    if not given:
        raise ValueError(
            f"none of the masks ({', '.join(list(source)[:3])}) is of a matrix with an adapter "
            f"({', '.join(list(layers)[:3])})."
        )
    return masks | given
