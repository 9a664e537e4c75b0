"""LoRA on a pruned model: adapters that merge without losing a zero.

A low-rank product B A has no zeros, so adding it to a pruned weight fills every one. There are two ways out:
`merge_with_masks` drops what the product has under the mask, and reports how much of the update that was;
`masked_adapters` trains with the masked product, so that a merge inside its `with` has nothing to drop.

Layout: matrices `[out, in]`; a LoRA layer adds `scaling * B A`, `[out, in]` (of a `Conv1D`, `[in, out]`).
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradprobe_hf.model.loading.adapters import tied_adapters
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.training.lora_layers import (
    AdapterMasks,
    active,
    base_matrix,
    given_masks,
    layer_masks,
    lora_layers,
    other_zeros,
    update,
    without_containers,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeReport:
    """What a merge of adapters into a pruned model kept and dropped.

    Attributes:
        sparsity: weight name -> fraction of zeros after the merge, for each linear layer with an adapter.
        lost: weight name -> `|| (B A) * mask || / || B A ||`, the part of the update that the mask dropped, in [0, 1].
        total_lost: the same over all matrices together.
        zeros: pruned weights of the matrices that the merge has changed.
        refilled: weight name -> pruned weights that had trained outside of linear layers with adapters
            (`modules_to_save`, an embedding, fused experts) and were set to zero again; `lost` is not of these.
    """

    sparsity: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    total_lost: float = 0.0
    zeros: int = 0
    refilled: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        others = "".join(f"; {count:,} weights of {name} set to zero again" for name, count in self.refilled.items())
        return (
            f"merged {len(self.lost)} matrices, every zero kept ({self.zeros:,}): the masks dropped "
            f"{self.total_lost:.1%} of the norm of the update{others}"
        )


@torch.no_grad()
def merge_with_masks(model: Any, masks: AdapterMasks = "from-zeros") -> tuple[nn.Module, MergeReport]:
    """Merge the active adapters of a PEFT model into its weights, and set pruned weights to zero again.

    Args:
        model: a `PeftModel` with LoRA adapters, wrapped or not. Do not use it afterwards, as with `merge_and_unload`.
        masks: weight name (in the model without adapters) -> bool `[out, in]`, True = pruned; a `PruneResult`; or
            `"from-zeros"`, the weights that are zero before the merge. Zeros of matrices without a mask are kept too.

    Returns:
        The model without adapters, and a report of what the merge dropped. Of an adapter that began as a part of the
        weight (PiSSA, OLoRA, ...) the product is more than the update, and so is what the report says was dropped.

    Raises:
        ImportError: PEFT is not installed.
        TypeError: no PeftModel, but a model of transformers with `add_adapter`.
        ValueError: no active LoRA adapter, one that is merged already, DoRA and other variants; masks of no matrix, or
            none of a matrix with an adapter; `"from-zeros"` without a zero, or under an adapter that has rewritten its
            weight (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA).

    Example:
        ```python
        model, report = merge_with_masks(peft_model)
        print(report)  # how much of the update the masks dropped
        ```
    """
    model = without_containers(model)
    layers = lora_layers(model)
    if not hasattr(model, "merge_and_unload"):
        raise TypeError(
            f"{type(model).__name__} has adapters by add_adapter, which PEFT cannot merge: save them "
            "(model.save_pretrained(folder)), and pass PeftModel.from_pretrained(the pruned model, folder)."
        )
    _warn_of_tied(model)
    given = given_masks(model, layers, masks)
    of_layers, others = layer_masks(model, layers, given), other_zeros(model, layers)
    # Before the merge, which unloads the adapters. What `masked_adapters` has kept out of training and inference is
    # nothing that the merge drops.
    squares = {
        name: _squared_norms(update(layer), None if _is_masked(layer) else of_layers[name])
        for name, layer in layers.items()
    }
    merged = model.merge_and_unload()
    sparsity, zeros = {}, 0
    for name, layer in layers.items():
        weight = merged.get_parameter(name)
        _set_to_zero(weight.t() if layer.fan_in_fan_out else weight, of_layers[name])  # a view: it fills the weight
        sparsity[name] = float((weight == 0).sum()) / weight.numel()
        zeros += int(of_layers[name].sum())
    refilled, kept = _keep_others(merged, given, layers, others)
    under, whole = (sum(column) for column in zip(*squares.values(), strict=True))
    lost = {name: _norm_ratio(*both) for name, both in squares.items()}
    return merged, MergeReport(sparsity, lost, _norm_ratio(under, whole), zeros + kept, refilled)


def _warn_of_tied(model: nn.Module) -> None:
    import peft

    for name, others in tied_adapters(model, peft):
        logger.warning(
            "the weight under the adapter of %s is that of %s, too, which the merge changes with it: the merged model "
            "is another one than that which was trained. Leave it out of target_modules, or untie them before "
            "(tie_word_embeddings=False)",
            name,
            ", ".join(others),
        )


@contextmanager
def masked_adapters(model: Any, masks: AdapterMasks = "from-zeros") -> Iterator[None]:
    """Use `(B A) * (1 - mask)` for the adapters' product, in forward and backward, for the body of the `with`.

    Costs a matrix product as large as the weight's own in every layer with an adapter; plain LoRA costs next to none.

    Args:
        model: a `PeftModel` with LoRA adapters, wrapped or not.
        masks: as for `merge_with_masks`.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: as `merge_with_masks`; an adapter with dropout; or a weight that is not zero under its mask, as one
            that its adapter has rewritten (PiSSA, ...): training would use what the merge drops.

    Example:
        ```python
        with masked_adapters(peft_model):
            Trainer(peft_model, args, train_dataset=rows).train()
            model, report = merge_with_masks(peft_model)  # report.total_lost == 0
        ```
    """
    model = without_containers(model)
    layers = lora_layers(model)
    _warn_of_tied(model)
    given = given_masks(model, layers, masks)
    of_layers = layer_masks(model, layers, given)
    for name, layer in layers.items():
        _check_maskable(name, layer, of_layers[name])
    if unmasked := _others_with_zeros(given, layers, other_zeros(model, layers)):
        logger.warning(
            "%s trains outside of linear layers with adapters, where nothing is masked: merge_with_masks sets its "
            "pruned weights to zero again, and drops what training made of them",
            ", ".join(unmasked[:3]),
        )
    hooks = {layer: _SubtractPruned(name, of_layers[name]) for name, layer in layers.items()}
    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer, hook in hooks.items()]
    # Before PEFT hangs hooks of its own on the layers, which it leaves there if one of these raises.
    handles.append(model.register_forward_pre_hook(_check_one_adapter, with_kwargs=True))
    _forget_compilations()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _forget_compilations()


def _forget_compilations() -> None:
    """What torch.compile has made so far goes on without a hook that is new, and with one that is gone: by default no
    guard looks for them (torch._dynamo.config.skip_nnmodule_hook_guards)."""
    if "torch._dynamo" in sys.modules:  # else nothing was compiled
        torch.compiler.reset()


class _SubtractPruned:
    """Hook that subtracts from a LoRA layer's output what its product adds under the mask.

    PEFT computes `x W^T + s (x A^T) B^T` and never forms B A, so the product cannot be masked where it is made. Its
    part under the mask, `(s B A) * mask`, is formed here and its output subtracted: what is left, and the gradient that
    autograd derives, are those of `(s B A) * (1 - mask)`.
    """

    def __init__(self, name: str, mask: Tensor) -> None:
        self.name, self.mask = name, mask

    def __call__(self, layer: Any, arguments: tuple[Any, ...], how: Mapping[str, Any], output: Tensor) -> Tensor:
        if layer.merged:
            raise ValueError(
                f"PEFT has merged the adapter of {self.name} into its weight, with what it adds to pruned ones: "
                "unmerge_adapter() takes it out again, and merge_with_masks merges without that."
            )
        _check_one_adapter(layer, arguments, how)  # `generate` passes by the model's own hook
        if layer.disable_adapters or not active(layer):  # the output has no product in it
            return output
        under = update(layer).where(self.mask.to(output.device), 0)
        return output - F.linear(arguments[0].to(under.dtype), under).to(output.dtype)


def _check_one_adapter(_module: Any, _arguments: Any, how: Mapping[str, Any]) -> None:
    if how.get("adapter_names") is not None:
        raise ValueError(
            "adapter_names gives each row of a batch an adapter of its own, and masked_adapters subtracts the same "
            "from all: call the model with the rows of one adapter at a time (set_adapter)."
        )


def _check_maskable(name: str, layer: Any, mask: Tensor) -> None:
    if any(isinstance(layer.lora_dropout[adapter], nn.Dropout) for adapter in active(layer)):
        raise ValueError(
            f"the adapter of {name} has dropout between its input and A, so B A is not what it adds. Make it with "
            "LoraConfig(lora_dropout=0.0)."
        )
    matrix = base_matrix(layer)
    if bool(matrix[mask.to(matrix.device)].any()):
        raise ValueError(
            f"{name} is not zero under its mask, so training would use what the merge drops. Set it to zero first, and "
            "make the adapter with an init_lora_weights that leaves the weight as it is (not PiSSA, OLoRA, ...)."
        )


def _others_with_zeros(
    given: Mapping[str, Tensor], layers: Mapping[str, Any], others: Mapping[str, Tensor]
) -> list[str]:
    """Those of the other weights that a merge changes which are pruned: with a mask, or else with zeros."""
    masked = {name.partition("[")[0] for name in given if name not in layers}
    return [name for name, zeros in others.items() if (name in masked if given else bool(zeros.any()))]


def _keep_others(
    merged: Any, given: Mapping[str, Tensor], layers: Mapping[str, Any], others: Mapping[str, Tensor]
) -> tuple[dict[str, int], int]:
    """Set what was pruned outside of linear layers with adapters to zero again.

    Args:
        given: masks; those of `layers` are not looked at.
        others: as of `other_zeros`; a mask that is given takes the place of the zeros.

    Returns:
        Weight name -> pruned weights that were not zero; and all pruned weights of `others`.
    """
    refilled: Counter[str] = Counter()
    beside = {name for name in given if name not in layers}
    for target in find_targets(merged, include=["*"]) if beside else ():
        if target.name in beside and target.parameter in others:
            target.view(others[target.parameter]).copy_(given[target.name])
        elif target.name in beside:  # one at a time: the masks of a whole model are as large as a quarter of it
            refilled[target.parameter] += _set_to_zero(target.matrix(merged), given[target.name])
    for name, mask in others.items():
        refilled[name] += _set_to_zero(merged.get_parameter(name), mask)
    return dict(+refilled), sum(int(mask.sum()) for mask in others.values())


def _set_to_zero(weight: Tensor, mask: Tensor) -> int:
    """Set what is under the mask to zero, in place, and return how much of it was not."""
    mask = mask.to(weight.device)
    count = int((weight[mask] != 0).sum())
    weight.masked_fill_(mask, 0)
    return count


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
