"""Loading checks: arguments that cannot be meant, before anything is read; and in which file a load went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from accelerate.utils.modeling import convert_file_size_to_int
from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from gradprobe_hf.runtime.option_checks import check_folder
from gradprobe_hf.runtime.paths import looks_like_path

# What a probe can compute in.
DTYPES = ("bfloat16", "float16", "float32", "float64")
COMPUTED = tuple(getattr(torch, name) for name in DTYPES)
WEIGHTS = "weights"
_MODEL = "a checkpoint folder or a Hub id 'user/name'"
MODULES = "modules.json"  # of sentence-transformers: what it does with a text, module by module
RESAVED = "SentenceTransformer(folder).save_pretrained(other) writes them as they are written today; give that folder"
_ADAPTER_CONFIG = "adapter_config.json"
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")  # of Accelerate
_DEVICES = "'auto', 'disk', 'cpu', a device such as 'cuda:0', or a dict from modules to devices"


def check_source(model_or_id: Any, kwargs: Mapping[str, Any], takes_file: bool = False) -> None:
    """Raise for what names no model, and for arguments that have no effect on it.

    Args:
        takes_file: whether a config.json by itself will do.

    Raises:
        FileNotFoundError: a path that is not there.
        ValueError: no name, or an argument without effect.
    """
    if not isinstance(model_or_id, (str, Path)) or not str(model_or_id):
        raise ValueError(f"model_or_id must be {_MODEL}, or a loaded PreTrainedModel, got {_shown(model_or_id)}.")
    name, path = str(model_or_id), Path(model_or_id)
    if not path.exists():
        if looks_like_path(name):
            raise FileNotFoundError(f"no such folder: {name!r}. A model is {_MODEL}.")
        return
    if kwargs.get("revision") is not None:
        raise ValueError(
            f"revision={kwargs['revision']!r} has no effect here: {name!r} is a folder, which has no branches. Leave "
            "revision out."
        )
    if (gguf_file := kwargs.get("gguf_file")) is not None:
        if path.is_dir() and not (path / gguf_file).is_file():
            raise FileNotFoundError(f"gguf_file={gguf_file!r}: {name!r} has no such file.")
        return
    if path.is_file():
        if takes_file:
            return
        raise ValueError(f"{name!r} is a file, not a folder: a model is {_MODEL}.")
    described = any((path / file).is_file() for file in (CONFIG_NAME, _ADAPTER_CONFIG))
    described = described or bool(kwargs.get("subfolder"))
    if not described and (path / MODULES).is_file() and any(path.glob(f"0_*/{CONFIG_NAME}")):
        raise FileNotFoundError(
            f"{name!r} has no {CONFIG_NAME}: sentence-transformers once wrote all modules into folders of their own. "
            f"{RESAVED}."
        )
    if not described:
        raise FileNotFoundError(f"{name!r} has no {CONFIG_NAME}: it is no checkpoint folder.")


def check_dtype(dtype: Any, stored: torch.dtype | None = None) -> None:
    """Raise ValueError unless weights can be loaded in it, and probed.

    Args:
        stored: the checkpoint's own, which is meant where none is given.
    """
    if dtype in (None, "auto") and stored is not None and stored not in COMPUTED:
        raise ValueError(
            f"the checkpoint is stored in {str(stored).removeprefix('torch.')}, which a probe cannot compute in: pass "
            "dtype='bfloat16' (--dtype bfloat16)."
        )
    for one in dtype.values() if isinstance(dtype, Mapping) else [dtype]:
        if one not in (None, "auto", *DTYPES, *COMPUTED):
            raise ValueError(f"dtype must be {', '.join(map(repr, DTYPES))} or 'auto', got {one!r}.")


def check_quantization(kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where weights would be quantized while they are loaded."""
    config = kwargs.get("quantization_config")
    values = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
    asked = [name for name in ("load_in_4bit", "load_in_8bit") if kwargs.get(name)]
    if config is not None and not values.get("dequantize"):
        asked.append(f"quantization_config={type(config).__name__}")
    if asked:
        raise ValueError(
            f"{', '.join(asked)} quantizes weights, and quantized weights cannot be pruned: leave it out, prune, and "
            "quantize the result. (What is stored in FP8 or MXFP4 is dequantized by itself.)"
        )


def check_placement(kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a device map, or limits of one, that no machine or not this one can have."""
    device_map, max_memory = kwargs.get("device_map"), kwargs.get("max_memory")
    if kwargs.get("offload_folder") is not None:
        _check_offload_folder(kwargs["offload_folder"], device_map)
    if device_map is not None and device_map not in ("disk", *PLANS):
        devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        for device in devices:
            if not (isinstance(device_map, Mapping) and device == "disk"):
                _check_device(device, device_map)
        if not devices:
            raise ValueError(f"device_map must be {_DEVICES}, got {device_map!r}.")
    if max_memory is None:
        return
    if device_map not in PLANS:
        raise ValueError(
            f"max_memory={max_memory!r} has no effect here: it belongs to device_map='auto'. Set that, or leave "
            "max_memory out."
        )
    if not isinstance(max_memory, Mapping):
        raise ValueError(f"max_memory must be a dict like {{0: '20GiB', 'cpu': '8GiB'}}, got {max_memory!r}.")
    for device, size in max_memory.items():
        if not isinstance(device, int) and device not in ("cpu", "disk"):
            raise ValueError(f"max_memory names devices by their number, 'cpu' or 'disk', got {device!r}.")
        try:
            convert_file_size_to_int(size)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"max_memory[{device!r}] must be a size such as '8GiB', got {size!r}.") from error


def _check_offload_folder(folder: Any, device_map: Any) -> None:
    check_folder("offload_folder", folder)
    if device_map is None:
        raise ValueError(
            f"offload_folder={str(folder)!r} has no effect here: it belongs to device_map='disk' or 'auto', and to "
            "accumulator_device='disk'. Set one of these, or leave offload_folder out."
        )


def _check_device(device: Any, device_map: Any) -> None:
    try:
        if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
            raise TypeError(device)
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device_map must be {_DEVICES}, got {device_map!r}.") from error
    if found.type == "cpu":
        return
    there = torch.accelerator.is_available() and found.type != "meta"
    own = torch.accelerator.current_accelerator() if there else None
    count = torch.accelerator.device_count() if there else 0
    is_own = own is not None and (isinstance(device, int) or own.type == found.type)
    if not is_own or not 0 <= (found.index or 0) < count:
        has = f"has {count} of type {own.type!r}" if own is not None else "has no accelerator that torch can use"
        raise ValueError(f"device_map={device_map!r}: there is no device {device!r}; this machine {has}, and 'cpu'.")


@contextmanager
def load_errors(model_or_id: Any, reading: str = CONFIG_NAME, plain: bool = True) -> Iterator[None]:
    """What goes wrong in a load, as OSError that names the file and what to do.

    Args:
        reading: what the body reads: the configuration, or `WEIGHTS`.
        plain: whether plain weights are wanted, which nothing makes of quantized ones.
    """
    try:
        yield
    except MemoryError:
        raise
    except ImportError as error:
        if "quantiz" not in str(error):
            raise
        if not plain:
            raise ImportError(f"{str(model_or_id)!r} is stored quantized: {error}") from error
        # To install what it asks for would only lead to the next error.
        raise ValueError(
            f"{str(model_or_id)!r} is stored quantized, and quantized weights cannot be pruned: name the model that it "
            f"was made from. ({error})"
        ) from error
    except Exception as error:  # transformers raises whatever its parts raise, KeyError and AttributeError among them
        if isinstance(error, RuntimeError) and should_reduce_batch_size(error):
            raise
        if "No space" in str(error):
            raise OSError(
                f"no room to offload {str(model_or_id)!r}: {error}. Choose another offload_folder (--offload-folder)."
            ) from error
        if not Path(model_or_id).exists():
            raise OSError(
                f"cannot load {str(model_or_id)!r}: {error} Check the spelling, the network and HF_HUB_OFFLINE; a "
                "gated or private model needs `hf auth login`."
            ) from error
        raise OSError(f"cannot load {str(model_or_id)!r}: {_cause(Path(model_or_id), reading, error)}") from error


def _cause(path: Path, reading: str, error: Exception) -> str:
    unsaid = isinstance(error, (KeyError, AttributeError, TypeError))  # their messages assume a traceback
    said = f"{type(error).__name__}: {error}" if unsaid else str(error)
    if reading == CONFIG_NAME:
        return f"its {CONFIG_NAME} cannot be used: {said}"
    if isinstance(error, OSError):
        return said
    if damaged := damaged_files(path):
        return f"{', '.join(damaged)} is damaged or cut off ({said}); fetch it again."
    if isinstance(error, ValueError):
        return said
    if (path / WEIGHTS_NAME).is_file():
        return (
            f"{WEIGHTS_NAME} is damaged, or a pickle of more than tensors, which could run code and is not read "
            f"({said.splitlines()[0]}). Fetch the weights as safetensors."
        )
    return said


def damaged_files(folder: Path) -> list[str]:
    """The names of the safetensors files that cannot be opened, and of an index that cannot be read."""
    found = []
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        try:
            index_of(folder / SAFE_WEIGHTS_INDEX_NAME)
        except ValueError:
            found.append(SAFE_WEIGHTS_INDEX_NAME)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            found.append(file.name)
    return found


def index_of(path: Path) -> dict[str, str]:
    """Tensor -> its file, of the index of a checkpoint in several files.

    Raises:
        ValueError: the index cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}. Fetch it again.") from error


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, (str, Path)) else type(value).__name__
