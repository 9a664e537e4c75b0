"""Weights: where a model's parameters really are, wherever Accelerate has put them, and how to read them.

A parameter that Accelerate offloads is a meta tensor between two forward passes; its values are in the `weights_map` of
the hook (accelerate/hooks.py, `AlignDevicesHook`) on its module, or on one around it with `place_submodules`. They are
in memory there (`cpu_offload`), or on disk: as accelerate's own `.dat` files (`disk_offload`), or in safetensors files,
which after `from_pretrained(device_map={"": "disk"})` are the user's checkpoint itself.
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
    """A hook's weights map, some of whose tensors are changed as they are read."""

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
    """Where an offloaded parameter is kept: `hook.weights_map[key]`."""

    hook: AlignDevicesHook
    key: str

    def read(self) -> Tensor:
        return self.hook.weights_map[self.key]

    @property
    def store(self) -> tuple[Mapping[str, Tensor], str]:
        """The map behind any view and prefix, and the key there."""
        found, key = self.hook.weights_map, self.key
        while isinstance(found, (WeightsView, PrefixedDataset)):
            found, key = (found.inner, key) if isinstance(found, WeightsView) else (found.dataset, found.prefix + key)
        return found, key

    @property
    def on_disk(self) -> bool:
        """False: `read` gives the stored tensor itself, and writing to it writes to the model."""
        store, key = self.store
        return isinstance(store, OffloadedWeightsLoader) and key not in store.state_dict


def offloaded_parameter(model: nn.Module, name: str) -> OffloadedParameter | None:
    """Where the parameter is kept when it is offloaded; None when it is in the model."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        for hook in _hooks(model.get_submodule(".".join(parts[:depth]))):
            if hook.offload and (depth == len(parts) - 1 or hook.place_submodules):
                return OffloadedParameter(hook, ".".join(parts[depth:]))
    return None


def read_weight(model: nn.Module, name: str) -> Tensor:
    """A parameter's values as they are stored; of a sharded one, this process's shard.

    What is in memory is not copied: writing to it writes to the model.

    Raises:
        ValueError: it is on the meta device and no hook of Accelerate knows where its values are.
    """
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        return local(parameter.detach())
    if (place := offloaded_parameter(model, name)) is None:
        raise ValueError(
            f"{name} has no data (meta device) and no Accelerate hook says where it is kept. Load the model with "
            "from_pretrained, or offload it with device_map, cpu_offload or disk_offload."
        )
    return place.read().detach()


def is_on_disk(model: nn.Module, name: str) -> bool:
    """Whether the values are in files, so that changing them takes more than writing to a tensor."""
    if not model.get_parameter(name).is_meta:
        return False
    place = offloaded_parameter(model, name)
    return place is not None and place.on_disk


def is_offloaded(model: nn.Module) -> bool:
    """Whether any parameter is kept outside of the model between two passes."""
    return any(hook.offload for module in model.modules() for hook in _hooks(module))


def settle(model: nn.Module) -> None:
    """Out of the model with what an interrupted pass has left there: Accelerate puts an offloaded weight out behind a
    forward that ends, and what is changed in the model meanwhile is lost with the next one."""
    for name, parameter in list(model.named_parameters(remove_duplicate=False)) if is_offloaded(model) else ():
        if not parameter.is_meta and offloaded_parameter(model, name) is not None:
            set_module_tensor_to_device(model, name, "meta")


def execution_device(model: nn.Module, name: str) -> torch.device:
    """Where a parameter is computed with."""
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        return parameter.device
    place = offloaded_parameter(model, name)
    return torch.device("cpu" if place is None else place.hook.execution_device)


def input_device(model: nn.Module) -> torch.device:
    """Where a batch goes: `model.device` is the meta device when the first parameter is offloaded."""
    return execution_device(model, next(name for name, _ in model.named_parameters()))


def aliases(model: nn.Module) -> dict[str, str]:
    """Tied parameters: every further name -> the canonical one, the first in the model's order.

    Offloading makes a new Parameter of each at every pass, so that identity alone does not tell.
    """
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    first: dict[int, str] = {}
    order = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    groups: dict[str, list[str]] = {}
    for name in order:
        same = first.setdefault(id(model.get_parameter(name)), name)
        groups.setdefault(tied.get(name, tied.get(same, same)), []).append(name)
    return {name: names[0] for names in groups.values() for name in names[1:]}


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    return [one for one in (getattr(hook, "hooks", None) or [hook]) if isinstance(one, AlignDevicesHook)]
