"""Parameters: where the values of a model's parameters are, and how to read them.

A parameter that Accelerate offloads is a meta tensor between two forward passes. Its values are in the `weights_map` of
an `AlignDevicesHook` (accelerate/hooks.py): that of its own module, or of a module around it with `place_submodules`.
There they are in memory (`cpu_offload`) or on disk: in accelerate's own `.dat` files (`disk_offload`), or in
safetensors files, which after `from_pretrained(device_map={"": "disk"})` are the user's checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, set_module_tensor_to_device
from torch import Tensor, nn

from gradprobe_hf.model.fsdp import local


class WeightsView(Mapping[str, Tensor]):
    """A hook's weights map with some tensors changed as they are read; the stored ones stay as they are."""

    def __init__(self, inner: Mapping[str, Tensor], changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self.inner, self.changes = inner, changes

    def __getitem__(self, key: str) -> Tensor:
        value = self.inner[key]
        return self.changes[key](value) if key in self.changes else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


@dataclass(frozen=True)
class OffloadedParameter:
    """Where the values of an offloaded parameter are: `hook.weights_map[key]`."""

    hook: AlignDevicesHook
    key: str

    def read(self) -> Tensor:
        return self.hook.weights_map[self.key]

    @property
    def store(self) -> tuple[Mapping[str, Tensor], str]:
        """The map behind every view and prefix, and the key there."""
        # Hooks on submodules see the model's one store through a PrefixedDataset each.
        found, key = self.hook.weights_map, self.key
        while isinstance(found, (WeightsView, PrefixedDataset)):
            found, key = (found.inner, key) if isinstance(found, WeightsView) else (found.dataset, found.prefix + key)
        return found, key

    @property
    def on_disk(self) -> bool:
        """Whether the values are in files. If not, `read` returns the stored tensor: writes to it reach the model."""
        store, key = self.store
        return isinstance(store, OffloadedWeightsLoader) and key not in store.state_dict


def offloaded_parameter(model: nn.Module, name: str) -> OffloadedParameter | None:
    """Where an offloaded parameter's values are; None for one that is in the model."""
    parts = name.split(".")
    # From the parameter's own module outwards: the innermost hook is the one that loads it.
    for depth in range(len(parts) - 1, -1, -1):
        for hook in _hooks(model.get_submodule(".".join(parts[:depth]))):
            if hook.offload and (depth == len(parts) - 1 or hook.place_submodules):
                return OffloadedParameter(hook, ".".join(parts[depth:]))
    return None


def read_weight(model: nn.Module, name: str) -> Tensor:
    """A parameter's values as they are stored; of a sharded one, this process's shard.

    Values in memory are not copied: writing to the result writes to the model.

    Raises:
        ValueError: it is on the meta device and no hook of Accelerate knows where its values are.
    """
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        return local(parameter.detach())
    if (offloaded := offloaded_parameter(model, name)) is None:
        raise ValueError(
            f"{name} has no data (meta device) and no Accelerate hook says where it is kept. Load the model with "
            "from_pretrained, or offload it with device_map, cpu_offload or disk_offload."
        )
    return offloaded.read().detach()


def is_on_disk(model: nn.Module, name: str) -> bool:
    """Whether a parameter's values are in files: changing them takes more than writing to a tensor."""
    if not model.get_parameter(name).is_meta:
        return False
    offloaded = offloaded_parameter(model, name)
    return offloaded is not None and offloaded.on_disk


def is_offloaded(model: nn.Module) -> bool:
    """Whether Accelerate keeps any parameter outside the model between two passes."""
    return any(hook.offload for module in model.modules() for hook in _hooks(module))


def unload_leftovers(model: nn.Module) -> None:
    """Unload offloaded weights that an interrupted pass has left in the model.

    Accelerate unloads a weight behind a forward, but not behind one that raised. The next forward would load it again
    from the store, and whatever was written to the copy in the model until then would be lost.
    """
    for name, parameter in list(model.named_parameters(remove_duplicate=False)) if is_offloaded(model) else ():
        if not parameter.is_meta and offloaded_parameter(model, name) is not None:
            set_module_tensor_to_device(model, name, "meta")


def execution_device(model: nn.Module, name: str) -> torch.device:
    """The device on which a parameter is used."""
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        return parameter.device
    offloaded = offloaded_parameter(model, name)
    return torch.device("cpu" if offloaded is None else offloaded.hook.execution_device)


def input_device(model: nn.Module) -> torch.device:
    """Where a batch goes. Not `model.device`: that is the meta device if the first parameter is offloaded."""
    return execution_device(model, next(name for name, _ in model.named_parameters()))


def aliases(model: nn.Module) -> dict[str, str]:
    """Tied parameters: every further name -> the canonical one, the first in the model's order."""
    # Identity finds ties that transformers does not list, but offloading breaks it: it makes a new Parameter of each
    # name in every pass. So what transformers lists counts first, unless both are there and somebody has parted them.
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = _listed_ties(model, every)
    first: dict[int, str] = {}
    groups: dict[str, list[str]] = {}
    for name, parameter in every.items():
        same = first.setdefault(id(parameter), name)
        groups.setdefault(tied.get(name, tied.get(same, same)), []).append(name)
    return {name: names[0] for names in groups.values() for name in names[1:]}


def listed_ties(model: nn.Module) -> dict[str, str]:
    """Names that transformers ties -> the one it ties them to, but for those that somebody has parted in memory."""
    return _listed_ties(model, dict(model.named_parameters(remove_duplicate=False)))


def _listed_ties(model: nn.Module, every: Mapping[str, nn.Parameter]) -> dict[str, str]:
    listed: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: other for name, other in listed.items() if not _are_apart(every.get(name), every.get(other))}


def _are_apart(one: nn.Parameter | None, other: nn.Parameter | None) -> bool:
    """Whether two parameters are in memory, and not the same."""
    return one is not None and other is not None and one is not other and not one.is_meta and not other.is_meta


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, by its canonical name: an offloaded model names those that are tied apart."""
    tied = aliases(model)
    return ((name, parameter) for name, parameter in model.named_parameters() if name not in tied)


def parameter_count(model: nn.Module) -> int:
    """How many parameters a model has; tied ones count once."""
    return sum(parameter.numel() for _, parameter in own_parameters(model))


def parameter_bytes(model: nn.Module) -> int:
    """How many bytes they take, in the file as in memory."""
    return sum(parameter.nbytes for _, parameter in own_parameters(model))


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """The hooks that load weights: Accelerate chains several in a SequentialHook."""
    hook = getattr(module, "_hf_hook", None)
    return [one for one in (getattr(hook, "hooks", None) or [hook]) if isinstance(one, AlignDevicesHook)]
