"""Adapters: a model with PEFT adapters -> the plain model they make of it, each folded into the weights it adapts.

An adapter is never pruned: its matrices are small and trained, and what they add would undo the zeros under them.
transformers wraps no model for them (`add_adapter` puts them inside), PEFT does (`PeftModel`); either is understood,
and so is a folder or repository that holds an adapter and names its base.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import transformers
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import is_offloaded

# What says where a file is, of the keyword arguments of `from_pretrained`.
_FINDING = ("cache_dir", "token", "revision", "local_files_only", "subfolder")
_AUTO_CLASSES = {  # of the tasks whose base may be stored as something else
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
WEIGHTS = "adapter_model.safetensors"
_OPTION = "merge_adapters=True (--merge-adapters)"
_IN_ONE_PIECE = (
    "adapters are folded into a model that is in memory in one piece. Fold them first (PEFT's merge_and_unload), save "
    "the result, and prune that."
)


@dataclass(frozen=True)
class AdapterSource:
    """A stored adapter: its name, what finds it (revision, token, ...), and the base it was trained on.

    Attributes:
        base: None: the adapter's configuration names none.
        task: what the base was loaded for, as PEFT names it: "SEQ_CLS", ...
        brings: modules that it holds whole, such as a classifier: the base need not have their weights.
    """

    name: str
    where: dict[str, Any]
    base: str | None
    base_revision: str | None = None
    task: str | None = None
    brings: frozenset[str] = frozenset()

    @property
    def auto_classes(self) -> list[Any]:
        """Of transformers, what loads the base; none: the base's own class."""
        name = _AUTO_CLASSES.get(self.task or "")
        return [getattr(transformers, name)] if name else []

    def labels(self) -> int | None:
        """Classes of the head that it brings, which its base need not have; None where it brings none."""
        if self.task not in ("SEQ_CLS", "TOKEN_CLS") or not self.brings:
            return None
        path = cached_file(self.name, WEIGHTS, _raise_exceptions_for_missing_entries=False, **_finding(self.where))
        if path is None:
            return None
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, no dict
        # The last matrix of a head has the fewest rows.
        rows = [
            shape[0]
            for name, shape in shapes.items()
            if len(shape) == 2 and not self.brings.isdisjoint(name.split(".")) and "lora_" not in name
        ]
        return min(rows, default=None)


def stored_adapter(name: str, where: dict[str, Any]) -> AdapterSource | None:
    """What a folder or repository holds, if it is an adapter.

    Args:
        where: keyword arguments of `from_pretrained` that say where files come from.

    Raises:
        ValueError: its configuration cannot be read.
    """
    path = find_adapter_config_file(name, **_finding(where))
    if path is None:
        return None
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return AdapterSource(
            name,
            where,
            values.get("base_model_name_or_path"),
            values.get("revision"),
            values.get("task_type"),
            frozenset(values.get("modules_to_save") or ()),
        )
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no adapter configuration: {error}") from error


def has_file(name: str, file: str, where: dict[str, Any]) -> bool:
    """Whether a folder or repository holds a file."""
    return bool(cached_file(name, file, _raise_exceptions_for_missing_entries=False, **_finding(where)))


def _finding(where: dict[str, Any]) -> dict[str, Any]:
    return {key: where[key] for key in _FINDING if key in where}


def check_mergeable(source: AdapterSource, merge_adapters: bool) -> str:
    """The name of the base to load, once it is clear that the adapter may be folded into it.

    Raises:
        ValueError: it was not asked for, or no base is named.
        ImportError: PEFT is not installed.
    """
    if not merge_adapters:
        raise ValueError(
            f"{source.name!r} is an adapter for {source.base!r} (adapter_config.json), not a model. For the model that "
            f"it makes of its base, fold it in with {_OPTION}."
        )
    imported_peft()
    if not source.base:
        raise ValueError(
            f"the adapter {source.name!r} does not name its base (base_model_name_or_path): load both with PEFT and "
            "pass the PeftModel."
        )
    return source.base


def merge_stored(base: PreTrainedModel, source: AdapterSource, vocabulary: int | None) -> PreTrainedModel:
    """The base, which is changed, with a stored adapter folded into it.

    Args:
        vocabulary: tokens of the tokenizer stored with the adapter: the embeddings it was trained with have as many.

    Raises:
        ValueError: the adapter is none of this base, cannot be folded, or some of its weights are missing.
    """
    _check_in_memory(base)
    if vocabulary is not None and vocabulary > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(vocabulary)
    try:
        with warnings.catch_warnings():
            # What is missing would be folded in as it was initialised.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            ignore_old_names()
            adapted = imported_peft().PeftModel.from_pretrained(base, source.name, **source.where)
    except (ValueError, RuntimeError, KeyError, UserWarning) as error:
        raise ValueError(f"the adapter {source.name!r} does not fit {source.base!r}: {error}") from error
    return _merged(adapted)


def ignore_old_names() -> None:
    """Let no warning of what PEFT asks transformers for by an old name: no user can do anything about it.

    It is for the body of a `warnings.catch_warnings`.
    """
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT wraps the model, or has layers inside it."""
    peft = sys.modules.get("peft")  # who has adapters has imported it
    if peft is None:
        return False
    layer = peft.tuners.tuners_utils.BaseTunerLayer
    return isinstance(model, (peft.PeftModel, peft.PeftMixedModel)) or any(
        isinstance(module, layer) for module in model.modules()
    )


def active_adapters(model: Any) -> str:
    """The names of the adapters that a model works with."""
    layer = sys.modules["peft"].tuners.tuners_utils.BaseTunerLayer
    names = [name for module in model.modules() if isinstance(module, layer) for name in module.active_adapters]
    return ", ".join(dict.fromkeys(names)) or "without a name"


def merged_copy(model: nn.Module, merge_adapters: bool) -> PreTrainedModel:
    """A copy of a model in memory with its active adapters folded in; the model itself stays as it is.

    Raises:
        ValueError: it was not asked for, the adapters cannot be folded or are switched off, or the model is not in
            memory in one piece.
    """
    if not merge_adapters:
        raise ValueError(
            f"this {type(model).__name__} has adapters ({active_adapters(model)}), which are not pruned: what they add "
            f"would undo the zeros under them. Fold them in with {_OPTION}: a copy of the model is pruned then."
        )
    _check_in_memory(model)
    _check_switched_on(model)
    return _merged(copy.deepcopy(model))


def check_stays_in_memory(source: AdapterSource, device_map: Any) -> None:
    """Raise ValueError for a device map that keeps weights of an adapter's base on the disk: before it is loaded."""
    if device_map == "disk" or (isinstance(device_map, Mapping) and "disk" in device_map.values()):
        raise ValueError(f"device_map={device_map!r} with the adapter {source.name!r}: {_IN_ONE_PIECE}")


def _check_in_memory(model: nn.Module) -> None:
    if is_offloaded(model) or is_sharded(model):
        raise ValueError(f"the model is offloaded or sharded: {_IN_ONE_PIECE}")


def _check_switched_on(model: nn.Module) -> None:
    """Raise ValueError where the model computes without some of its adapters, which PEFT would fold in all the same."""
    layer = imported_peft().tuners.tuners_utils.BaseTunerLayer
    off = [name for name, module in model.named_modules() if isinstance(module, layer) and module.disable_adapters]
    if off:
        raise ValueError(
            f"adapters of this {type(model).__name__} are switched off (disable_adapter, disable_adapters), in "
            f"{off[0]} say: it is not the model that they would be folded into. Switch them on, or give the base alone."
        )


def _merged(model: Any) -> PreTrainedModel:
    peft = imported_peft()
    _check_untied(model, peft)
    is_wrapped = isinstance(model, (peft.PeftModel, peft.PeftMixedModel))
    if is_wrapped and not isinstance(getattr(model, "base_model", None), peft.tuners.tuners_utils.BaseTuner):
        raise ValueError(
            "this adapter learns a prompt or a prefix, which no weight can take in: prune the base model alone."
        )
    try:
        plain = _folded(model, peft)
    except (NotImplementedError, RuntimeError) as error:
        if "merg" not in str(error):  # out of memory, say
            raise
        raise ValueError(f"an adapter of this {type(model).__name__} cannot be folded in: {error}") from error
    # Otherwise `save_pretrained` would write an adapter alone.
    plain.__dict__.pop("peft_config", None)
    plain._hf_peft_config_loaded = False
    plain.requires_grad_(True)  # PEFT froze what is under the adapters; a model that is loaded can be trained
    return plain


def _folded(model: Any, peft: Any) -> PreTrainedModel:
    if isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        plain: PreTrainedModel = model.merge_and_unload()
        return plain
    _unload_inside(model, peft.tuners.tuners_utils.BaseTunerLayer)
    return cast(PreTrainedModel, model)


def _check_untied(model: nn.Module, peft: Any) -> None:
    """Raise ValueError for an adapter of one end of tied weights: folded in, it would change the other end, too."""
    for name, others in tied_adapters(model, peft):
        raise ValueError(
            f"an adapter of {name} cannot be folded in: its weight is tied to that of {', '.join(others)}, "
            "which would change with it. Untie them first (tie_word_embeddings=False, and a weight for each "
            "end), fold with PEFT's merge_and_unload, save the result, and prune that."
        )


def tied_adapters(model: nn.Module, peft: Any) -> Iterator[tuple[str, list[str]]]:
    """Modules with an adapter whose weight others have, too, and those others."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        # Trained tokens are replaced at both ends by PEFT itself.
        if (
            isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)
            and "TrainableTokens" not in type(module).__name__
        ):
            weight = getattr(module.get_base_layer(), "weight", None)
            others = [other for other in holders.get(id(weight), []) if not other.startswith(f"{name}.")]
            if others:
                yield name, others


def _unload_inside(model: nn.Module, layer: type[Any]) -> None:
    """PEFT's `merge_and_unload`, for adapters that nothing wraps."""
    outer = [name for name, module in model.named_modules() if _is_adapted(module, layer)]
    for name in outer:
        if any(name.startswith(f"{other}.") for other in outer):
            continue  # an adapter's own layers go with it
        module: Any = model.get_submodule(name)
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            module.merge()
            plain = module.get_base_layer()
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, plain)


def _is_adapted(module: nn.Module, layer: type[Any]) -> bool:
    return isinstance(module, layer) or hasattr(module, "unload_and_optionally_merge_module")


def imported_peft() -> Any:
    """The package, or ImportError with what to install."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters need PEFT: pip install peft") from error
    return peft
