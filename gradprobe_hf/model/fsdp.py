"""Sharding: a model whose parameters FSDP2 keeps in shards (`fully_shard`, or transformers' `distributed_config`).

Between two passes every parameter is a DTensor, of which a process holds some rows; FSDP gathers a group of them for
its forward and its backward, as plain tensors. What is known of a weight is kept where the weight is: a sum over all
processes is reduced to the shards, and never whole in any of them for longer than its matrix is worked on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class ShardLayout:
    """How a parameter is dealt to the processes. Shapes are those of the parameter as it is stored."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def reduce(self, full: Tensor, operation: str) -> Tensor:
        """This process's shard of the `"sum"` or `"max"` of a whole tensor over all processes. A collective."""
        part = DTensor.from_local(full, self.mesh, [Partial(operation)] * self.mesh.ndim, run_check=False)
        return part.redistribute(placements=self.placements).to_local()


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 manages any part of the model. (A DTensor alone may be tensor parallelism.)"""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def plain_class(model: nn.Module) -> type[nn.Module]:
    """The class of the model: FSDP2 makes one of its own of it, in place."""
    return next(cls for cls in type(model).__mro__ if issubclass(cls, nn.Module) and not issubclass(cls, FSDPModule))


def shard_layout(model: nn.Module, name: str) -> ShardLayout | None:
    """How the parameter is sharded, None when it is not. Between two passes only: in one, the parameter is whole."""
    parameter = model.get_parameter(name)
    if not isinstance(parameter, DTensor):
        return None
    local, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return ShardLayout(parameter.device_mesh, parameter.placements, tuple(parameter.shape), tuple(local), tuple(offset))


def check_sharding(model: nn.Module) -> None:
    """Raise ValueError for what is sharded in a way that cannot be probed.

    ZeRO-3 gathers parameters through hooks of its own optimizer and partitions them flat, without a shape.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            "the model is partitioned by DeepSpeed ZeRO-3, whose parameters have no data and no shape of their own. "
            "Use FSDP2 (examples/accelerate_fsdp2.yaml), offload (device_map='auto'), or one whole model per process."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and (
            parameter.device_mesh.ndim != 1 or not all(type(placed) is Shard for placed in parameter.placements)
        ):
            raise ValueError(
                f"{name} is placed as {parameter.placements} on a mesh of {parameter.device_mesh.ndim} dimensions: "
                "only plain FSDP2 over one dimension can be pruned, without tensor or hybrid parallelism."
            )


def reshard(model: nn.Module) -> None:
    """Let gathered parameters go: after a pass without backward the root's would stay, and hide what is written to
    the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Parameters are shards before and after the body, also when it raised in the middle of a pass."""
    if not is_sharded(model):
        yield
        return
    if isinstance(model, FSDPModule):
        # FSDP looks at the parameters when it first runs: frozen ones would have no gradient dtype for ever after.
        model._get_fsdp_state()._lazy_init()
    reshard(model)
    try:
        yield
    except BaseException:
        if isinstance(model, FSDPModule):
            model.reset_iter_state()
        raise
    finally:
        reshard(model)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded, on every process. A collective for one that is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: writing to it writes to the model."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
