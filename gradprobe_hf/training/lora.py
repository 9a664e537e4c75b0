"""LoRA on a pruned model: adapters that merge without losing a zero.

A low-rank product B A has no zeros, so adding it to a pruned weight fills every one. There are two ways out:
`merge_with_masks` drops what the product has under the mask, and reports how much of the update that was;
`masked_adapters` trains with the masked product, so that a merge inside its `with` has nothing to drop.

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
    """What a merge of adapters into a pruned model kept and dropped.

    Attributes:
        sparsity: weight name -> fraction of zeros after the merge, for each matrix with an adapter.
        lost: weight name -> `|| (B A) * mask || / || B A ||`, the part of the update that the mask dropped, in [0, 1].
        total_lost: the same over all matrices together.
    """

    sparsity: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    total_lost: float = 0.0

    def __str__(self) -> str:
        return (
            f"merged {len(self.lost)} matrices, every zero kept: the masks dropped {self.total_lost:.1%} of the norm "
            "of the update"
        )


@torch.no_grad()
def merge_with_masks(model: Any, masks: AdapterMasks = "from-zeros") -> tuple[nn.Module, MergeReport]:
    """Merge the active adapters of a PEFT model into its weights, and set pruned weights to zero again.

    Args:
        model: a `PeftModel` with LoRA adapters. Do not use it afterwards, as with `merge_and_unload`.
        masks: weight name (in the model without adapters) -> bool `[out, in]`, True = pruned; a `PruneResult`; or
            `"from-zeros"`, the weights under the adapters that are zero. Zeros of matrices without a mask are kept too.

    Returns:
        The model without adapters, and a report of what the merge dropped.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: no active LoRA adapter, or no mask of a matrix with an adapter.

    Example:
        ```python
        model, report = merge_with_masks(peft_model)
        print(report)  # how much of the update the masks dropped
        ```
    """
    layers = _lora_layers(model)
    masks = _resolved(layers, masks)
    # Before the merge, which unloads the adapters. What `masked_adapters` has kept out of training and inference is
    # nothing that the merge drops.
    squares = {
        name: _squared_norms(_update(layer), None if _is_masked(layer) else masks[name])
        for name, layer in layers.items()
    }
    merged = model.merge_and_unload()
    sparsity = {}
    for name, layer in layers.items():
        weight = merged.get_parameter(name)
        matrix = weight.t() if layer.fan_in_fan_out else weight  # a view: filling it fills the weight
        matrix.masked_fill_(masks[name].to(weight.device), 0)
        sparsity[name] = float((weight == 0).sum()) / weight.numel()
    under, whole = (sum(column) for column in zip(*squares.values(), strict=True))
    lost = {name: _norm_ratio(*both) for name, both in squares.items()}
    return merged, MergeReport(sparsity, lost, _norm_ratio(under, whole))


@contextmanager
def masked_adapters(model: Any, masks: AdapterMasks = "from-zeros") -> Iterator[None]:
    """Use `(B A) * (1 - mask)` for the adapters' product, in forward and backward, for the body of the `with`.

    Costs a matrix product as large as the weight's own in every layer with an adapter; plain LoRA costs next to none.

    Args:
        model: a `PeftModel` with LoRA adapters.
        masks: as for `merge_with_masks`.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: no active LoRA adapter, no mask of a matrix with one, or an adapter with dropout.

    Example:
        ```python
        with masked_adapters(peft_model):
            Trainer(peft_model, args, train_dataset=rows).train()
            model, report = merge_with_masks(peft_model)  # report.total_lost == 0
        ```
    """
    layers = _lora_layers(model)
    masks = _resolved(layers, masks)
    for name, layer in layers.items():
        if any(isinstance(layer.lora_dropout[adapter], nn.Dropout) for adapter in _active(layer)):
            raise ValueError(
                f"the adapter of {name} has dropout between its input and A, so B A is not what it adds. Make it with "
                "LoraConfig(lora_dropout=0.0)."
            )
    handles = [layer.register_forward_hook(_SubtractPruned(masks[name])) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _SubtractPruned:
    """Hook that subtracts from a LoRA layer's output what its product adds under the mask.

    PEFT computes `x W^T + s (x A^T) B^T` and never forms B A, so the product cannot be masked where it is made. Its
    part under the mask, `(s B A) * mask`, is formed here and its output subtracted: what is left, and the gradient that
    autograd derives, are those of `(s B A) * (1 - mask)`.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, layer: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        if layer.merged or layer.disable_adapters:  # the output has no product in it
            return output
        under = _update(layer).where(self.mask.to(output.device), 0)
        return output - F.linear(arguments[0].to(under.dtype), under).to(output.dtype)


def _lora_layers(model: Any) -> dict[str, Any]:
    """Weight name in the model without adapters -> the LoRA layer around it."""
    try:
        from peft.tuners.lora import Linear
    except ImportError as error:
        raise ImportError("LoRA needs PEFT: pip install 'gradprobe_hf[peft]'") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"adapters are merged into a PeftModel, got {model!r:.80}.")
    # `base_model.model.` is what PEFT wraps around the model.
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
    """Whether `masked_adapters` is in effect for a layer: then a merge drops nothing that it used."""
    return any(isinstance(hook, _SubtractPruned) for hook in layer._forward_hooks.values())


def _squared_norms(update: Tensor, mask: Tensor | None) -> tuple[float, float]:
    """Squared norms of the part of an update under the mask (0 without one), and of all of it; in float64."""
    # In float64: squares of millions of small values, and a ratio of two sums that may differ little.
    whole = float(update.double().square().sum())
    return (0.0 if mask is None else float(update[mask.to(update.device)].double().square().sum())), whole


def _norm_ratio(under: float, whole: float) -> float:
    return math.sqrt(under / whole) if whole else 0.0


def _active(layer: Any) -> list[str]:
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def _update(layer: Any) -> Tensor:
    """What the active adapters add to the matrix `[out, in]`, with its graph."""
    total = sum(layer.get_delta_weight(adapter) for adapter in _active(layer))
    assert isinstance(total, Tensor), "there is an active adapter"
    return total.t() if layer.fan_in_fan_out else total


def _resolved(layers: Mapping[str, Any], source: AdapterMasks) -> dict[str, Tensor]:
    """A mask for every matrix with an adapter: the one that was passed, or else its zeros."""
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
