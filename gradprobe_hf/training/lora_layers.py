"""LoRA layers of a PEFT model: what they add, the masks of the weights under them, and what cannot be masked.

Layout: masks are bool `[out, in]`, True = pruned. Names are those of the model without adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.training.keeper import check_source

AdapterMasks = Mapping[str, Tensor] | PruneResult | Literal["from-zeros"]

# Initialisations that write another weight into the layer, with B A taken out of it: no zero is left there to read.
REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")

_WRAPPERS = re.compile(r"(\.token_adapter)?\.(base_layer|original_module)(?=\.)")


def without_containers(model: Any) -> Any:
    """A model without DDP and `torch.compile` around it: in those its parameters have other names than when merged."""
    return extract_model_from_parallel(model, keep_torch_compile=False) if isinstance(model, nn.Module) else model


def lora_layers(model: Any) -> dict[str, Any]:
    """Weight name -> the LoRA layer around it, of linear layers with an active adapter.

    Raises:
        ImportError: PEFT is not installed.
        TypeError: not a module.
        ValueError: there is none, one is merged already, or one adds something else than B A (DoRA, ...), or a bias
            where the layer has none.
    """
    try:
        from peft.tuners.lora import Linear, LoraLayer
    except ImportError as error:
        raise ImportError("LoRA needs PEFT: pip install peft") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"adapters are merged into a PeftModel, got {model!r:.80}.")
    found = {
        _without_wrappers(name) + ".weight": module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and active(module)
    }
    if not found:
        others = {type(one).__name__ for one in model.modules() if isinstance(one, LoraLayer) and active(one)}
        if quantised := sorted(name for name in others if name not in ("Embedding", "Conv1d", "Conv2d", "Conv3d")):
            raise ValueError(
                f"the adapters of this {type(model).__name__} are around layers that are no plain linear ones "
                f"({', '.join(quantised)}), quantised ones say, into which they cannot be merged under a mask. Load "
                "the base model without quantization_config."
            )
        raise ValueError(
            f"{type(model).__name__} has no active LoRA adapter of a linear layer. Pass the PeftModel, before "
            "merge_and_unload."
        )
    _check_not_merged(model)
    _check_plain(found)
    return found


def active(layer: Any) -> list[str]:
    """Its active adapters."""
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def update(layer: Any) -> Tensor:
    """What the active adapters add to the matrix `[out, in]`, with its graph."""
    total = sum(layer.get_delta_weight(adapter) for adapter in active(layer))
    assert isinstance(total, Tensor), "there is an active adapter"
    return total.t() if layer.fan_in_fan_out else total


def base_matrix(layer: Any) -> Tensor:
    """The matrix `[out, in]` under the adapters."""
    weight: Tensor = layer.get_base_layer().weight
    return weight.t() if layer.fan_in_fan_out else weight


def rewriting(model: Any, layer: Any) -> str | None:
    """The initialisation of an active adapter that has changed the weight under it."""
    configs = getattr(model, "peft_config", {})
    chosen = (getattr(configs.get(adapter), "init_lora_weights", None) for adapter in active(layer))
    return next((one for one in chosen if isinstance(one, str) and one.lower().startswith(REWRITING)), None)


def given_masks(model: Any, layers: Mapping[str, Any], source: AdapterMasks) -> Mapping[str, Tensor]:
    """The masks that a user passed; none with `"from-zeros"`.

    Raises:
        ValueError: no masks, one of no matrix of the model or of another shape, or none of a matrix with an adapter.
    """
    check_source(source)
    if isinstance(source, str):
        return {}
    masks = source.masks if isinstance(source, PruneResult) else source
    matrices = {name: parameter for name, parameter in _parameters(model) if parameter.ndim >= 2}
    # A mask of an expert is named by the fused parameter and its slice: "mlp.experts.down_proj[3]".
    unknown = [name for name in masks if name.partition("[")[0] not in matrices]
    if unknown or not masks:
        raise ValueError(
            f"masks for {', '.join(unknown[:3]) or 'nothing'}: the model has matrices like {next(iter(layers))!r}. "
            "Pass the masks of this model, a PruneResult, or 'from-zeros'."
        )
    if not any(name in layers for name in masks):
        raise ValueError(
            f"none of the masks ({', '.join(list(masks)[:3])}) is of a matrix with an adapter "
            f"({', '.join(list(layers)[:3])})."
        )
    for name, mask in masks.items():
        shape = tuple(matrices[name.partition("[")[0]].shape[-2:])
        if tuple(mask.shape) not in (shape, shape[::-1]) or (
            name in layers and mask.shape != base_matrix(layers[name]).shape
        ):
            raise ValueError(f"the mask of {name} is {tuple(mask.shape)}, and the matrix is stored as {shape}.")
    return masks


def layer_masks(model: Any, layers: Mapping[str, Any], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A mask for every matrix with an adapter: the one that was passed, or else its zeros.

    Raises:
        ValueError: zeros of a weight that its adapter has rewritten, or no zero at all.
    """
    for name, layer in layers.items():
        if name not in given and (chosen := rewriting(model, layer)):
            raise ValueError(
                f"init_lora_weights={chosen!r} has changed the weight under the adapter of {name}, and its zeros are "
                "gone: pass the masks of the pruning, with one for this matrix."
            )
    masks = {name: given[name] if name in given else base_matrix(layer) == 0 for name, layer in layers.items()}
    if not given and not any(bool(mask.any()) for mask in masks.values()):
        raise ValueError(
            "masks='from-zeros', and no weight under an adapter is zero. Pass the masks of the pruning (a PruneResult "
            "of prune_pretrained), or merge with merge_and_unload."
        )
    return masks


def other_zeros(model: Any, layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weight name -> its zeros, as stored, of all else that a merge changes.

    That is what has an adapter and is no linear layer (embeddings, fused experts), and `modules_to_save`.
    """
    return {
        name: parameter.detach() == 0
        for name, parameter in _parameters(model, wrapped=True)
        if parameter.ndim >= 2 and name not in layers
    }


def _parameters(model: Any, wrapped: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the model without adapters, tied ones by each name; or only those that PEFT has wrapped."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Of two adapters around one module, the inner one's own matrices are inside of a wrapper too.
        if ".lora_" not in name and (not wrapped or _WRAPPERS.search(name)):
            yield _without_wrappers(name), parameter


def _without_wrappers(name: str) -> str:
    """A name without what PEFT puts around the model, and around modules.

    >>> _without_wrappers("base_model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj")
    'layers.0.mlp.experts.down_proj'
    """
    return _WRAPPERS.sub("", name.removeprefix("base_model.model."))


def _check_not_merged(model: nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise ValueError(
                f"the adapter of {_without_wrappers(name)} is merged already, which has filled the zeros. Call "
                "unmerge_adapter() first."
            )


def _check_plain(layers: Mapping[str, Any]) -> None:
    for name, layer in layers.items():
        # PEFT finds out when it has filled the first weight's zeros.
        if any(layer.lora_bias[one] for one in active(layer)) and getattr(layer.get_base_layer(), "bias", None) is None:
            raise ValueError(
                f"the adapter of {name} has a bias, which cannot be merged into a layer without one. Make it with "
                "lora_bias=False."
            )
        variants = [type(layer.lora_variant[one]).__name__ for one in active(layer) if one in layer.lora_variant]
        if variants:
            raise ValueError(
                f"the adapter of {name} adds something else than B A ({variants[0].removesuffix('LinearVariant')}): "
                "what the masks drop of it cannot be told. Make it with plain LoRA (use_dora=False)."
            )
