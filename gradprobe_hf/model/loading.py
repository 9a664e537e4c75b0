"""Loading: an id, a folder or a loaded model -> the model in eval mode and its processing class."""

from __future__ import annotations

import difflib
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gradprobe_hf.model.families import names_causal_class

logger = logging.getLogger(__name__)

DeviceMap: TypeAlias = str | int | torch.device | Mapping[str, str | int | torch.device] | None

# The arguments of `from_pretrained` that say where files come from: configuration and tokenizer need the same.
SOURCE_KWARGS = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "trust_remote_code", "gguf_file")


def load_model(model_or_id: PreTrainedModel | str, **from_pretrained_kwargs: Any) -> PreTrainedModel:
    """A loaded model as it is, or `from_pretrained` with the class the checkpoint asks for.

    `dtype` defaults to the checkpoint's. A GGUF file is dequantised, so that it can be saved again. `device_map="disk"`
    offloads every module.

    Raises:
        ValueError: arguments for loading given with a loaded model, or a device map that names no module.
        OSError: no such model, a gated one, or no network; transformers' message and the remedies.
    """
    if isinstance(model_or_id, PreTrainedModel):
        if from_pretrained_kwargs:
            raise ValueError(
                f"{', '.join(from_pretrained_kwargs)} only make sense when a model is loaded by name; "
                f"this {type(model_or_id).__name__} is loaded already."
            )
        return model_or_id
    if not isinstance(model_or_id, (str, bytes)) and not hasattr(model_or_id, "__fspath__"):
        raise ValueError(f"expected a model id, a folder or a PreTrainedModel, got {type(model_or_id).__name__}.")
    with ExitStack() as undo, _load_errors(model_or_id):
        scratch = None
        config = AutoConfig.from_pretrained(model_or_id, **_source(from_pretrained_kwargs))
        if (device_map := from_pretrained_kwargs.get("device_map")) is not None:
            from_pretrained_kwargs["device_map"] = device_map = _checked_map(config, device_map)
            if from_pretrained_kwargs.get("offload_folder") is None and device_map != {"": "cpu"}:
                # transformers writes there what it cannot read from the checkpoint as it is, such as fused experts.
                scratch = from_pretrained_kwargs["offload_folder"] = Path(tempfile.mkdtemp(prefix="gradprobe-offload-"))
                undo.callback(shutil.rmtree, scratch, True)
        if "gguf_file" in from_pretrained_kwargs:
            from_pretrained_kwargs.setdefault("quantization_config", GgufConfig(dequantize=True))
            from_pretrained_kwargs.setdefault("config", config)  # to parse a GGUF header takes seconds, each time
        model = model_class(config).from_pretrained(model_or_id, **from_pretrained_kwargs)
        undo.pop_all()  # from here on the folder lives as long as the model
    if scratch is not None:
        weakref.finalize(model, shutil.rmtree, scratch, True)
    if "gguf_file" in from_pretrained_kwargs:
        # The weights are plain now: a checkpoint saved from them must not claim to be a GGUF one.
        model.config.__dict__.pop("quantization_config", None)
    return model


@contextmanager
def _load_errors(model_or_id: Any) -> Iterator[None]:
    """What can go wrong while a model is loaded, as OSError with what to do about it."""
    try:
        yield
    except SafetensorError as error:  # no OSError, whatever the cause
        if "No space" in str(error):
            raise OSError(
                f"no room to offload {str(model_or_id)!r}: {error}. Choose another offload_folder (--offload-folder)."
            ) from error
        raise OSError(
            f"cannot load {str(model_or_id)!r}: its weights are damaged ({error}); fetch them again."
        ) from error
    except OSError as error:
        raise _not_found(model_or_id, error) from error


def _source(from_pretrained_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in from_pretrained_kwargs.items() if name in SOURCE_KWARGS}


def _checked_map(config: PreTrainedConfig, device_map: DeviceMap) -> DeviceMap:
    """The device map for `from_pretrained`, where "disk" stands for every module.

    Raises:
        ValueError: a name that is no module of the model. Accelerate would ignore it.
    """
    if device_map == "disk":
        return {"": "disk"}
    if not isinstance(device_map, Mapping):
        return device_map
    names = [name for name, _ in skeleton(config).named_modules()]
    for wanted in device_map:
        if wanted not in names and not any(name.startswith(f"{wanted}.") for name in names):
            near = difflib.get_close_matches(wanted, names, n=1)
            raise ValueError(
                f"device_map names {wanted!r}, but the model has no such module"
                + (f"; did you mean {near[0]!r}?" if near else f". Its modules are named like {', '.join(names[1:4])}.")
            )
    return dict(device_map)


def load_config(name_or_path: str, **source: Any) -> PreTrainedConfig:
    """The configuration of a Hub id, a folder or a JSON file. No weight is fetched or read.

    Raises:
        OSError: no such model, a gated one, or no network; transformers' message and the remedies.
    """
    try:
        return AutoConfig.from_pretrained(name_or_path, **source)
    except OSError as error:
        raise _not_found(name_or_path, error) from error


def skeleton(config: PreTrainedConfig, cls: Any = None, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """The model without its weights: every parameter and buffer on the meta device, in eval mode.

    Args:
        cls: its class; by default the one the checkpoint asks for.
        dtype: of the weights, or its name; by default the checkpoint's, or float32 if it names none.

    Raises:
        ValueError: no such dtype.
    """
    dtype = _dtype(dtype or getattr(config, "dtype", None) or torch.float32)
    cls = cls or model_class(config)
    with init_empty_weights(include_buffers=True):
        model = cls.from_config(config) if cls is AutoModelForCausalLM else cls(config)
    model.tie_weights()  # `init_empty_weights` replaces each parameter by one of its own, and breaks the ties
    return model.to(dtype).eval()


def load_processing_class(model: PreTrainedModel, **from_pretrained_kwargs: Any) -> Any:
    """The tokenizer (or processor) stored beside the model, or None."""
    if not model.name_or_path:
        return None
    # A processor holds the tokenizer of a model that has both. A GGUF file has none, and takes seconds to say so.
    for auto in (AutoTokenizer,) if "gguf_file" in from_pretrained_kwargs else (AutoProcessor, AutoTokenizer):
        try:
            return auto.from_pretrained(model.name_or_path, **_source(from_pretrained_kwargs))
        except Exception as error:  # tokenizers raises plain Exception; a model without a tokenizer can still be pruned
            reason = error
    logger.warning("no tokenizer or processor was found for %s: %s", model.name_or_path, reason)
    return None


def model_class(config: Any) -> Any:
    """The class the checkpoint was saved as; a causal language model if it names none."""
    architecture = (getattr(config, "architectures", None) or [""])[0]
    named = getattr(transformers, architecture, None)
    if named is not None and issubclass(named, PreTrainedModel) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return named
    return AutoModelForCausalLM if names_causal_class(architecture) or named is None else named


def _dtype(name: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be 'bfloat16', 'float16', 'float32' or 'float64', got {name!r}.")
    return found


def _not_found(model_or_id: Any, error: OSError) -> OSError:
    return OSError(
        f"cannot load {str(model_or_id)!r}: {error} Check the spelling, the network and HF_HUB_OFFLINE; a gated or "
        "private model needs `hf auth login`."
    )
