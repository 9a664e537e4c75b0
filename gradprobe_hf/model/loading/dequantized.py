"""Dequantised weights: of a checkpoint in FP8 or MXFP4, which transformers makes plain numbers of as it loads it.

Before 5.24 it remembers how, and `save_pretrained` would go that way back: weights rounded again, or experts under the
names of packed ones, and a configuration that says nothing of it.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform
from transformers.quantizers.auto import AutoQuantizationConfig

PLAIN_WITHOUT_KERNELS = ("fp8", "mxfp4")  # what transformers dequantises where nothing computes in it


def keep_dequantized(model: PreTrainedModel) -> str | None:
    """Let a model be saved in the numbers that it computes with. Returns the type it was stored in; None: as it is."""
    used: list[WeightTransform] = getattr(model, "_weight_conversions", None) or []
    stored_as = next(filter(None, map(_quantised_type, used)), None)
    if stored_as is None or getattr(model, "hf_quantizer", None) is not None:  # quantised still: refused elsewhere
        return None
    # Experts are dequantised and fused in one: of that the family's own part stays.
    own = {tuple(one.target_patterns): one for one in get_model_conversion_mapping(model, add_legacy=False)}
    plain = [own.get(tuple(one.target_patterns)) if _quantised_type(one) else one for one in used]
    model._weight_conversions = [one for one in plain if one is not None]
    return stored_as


def made_plain(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments with which a checkpoint in FP8 or MXFP4 gets plain weights; none for others.

    Without a GPU that computes in these transformers does so by itself. Where there is one it would not: the same
    checkpoint, which can be pruned on one machine, would be refused on another.
    """
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") not in PLAIN_WITHOUT_KERNELS:
        return {}
    # All that is stored, and not `dequantize` alone: a list of what is plain already would be replaced, too.
    return {"quantization_config": AutoQuantizationConfig.from_dict(stored | {"dequantize": True})}


def check_stored_plain(name: str, config: PreTrainedConfig) -> None:
    """Raise ValueError for a checkpoint of quantized weights, unless transformers makes plain ones of them.

    Before it is loaded: what is missing for that, a package say, would only lead to the next error.
    """
    stored = getattr(config, "quantization_config", None)
    values = stored if isinstance(stored, dict) else stored.to_dict() if stored is not None else {}
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if values and method not in (*PLAIN_WITHOUT_KERNELS, "gguf") and not values.get("dequantize"):
        raise ValueError(
            f"{name!r} is stored quantized ({method}), and quantized weights cannot be pruned: name the model that it "
            "was made from."
        )


def _quantised_type(conversion: WeightTransform) -> str | None:
    """What a conversion dequantises from, if it does."""
    for operation in getattr(conversion, "operations", ()):
        if (quantizer := getattr(operation, "hf_quantizer", None)) is not None:
            method = quantizer.quantization_config.quant_method
            return str(getattr(method, "value", method))
    return None
