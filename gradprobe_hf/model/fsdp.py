"""FSDP2: models whose parameters are sharded (`fully_shard`, or transformers' `distributed_config`).

Between two passes every parameter is a DTensor, of which each process holds some rows. For its forward and its backward
FSDP gathers a module's parameters into plain tensors, and reshards them behind it. Statistics follow the weights: a sum
over all processes is reduced to the shards, so that no process holds a whole one for longer than one matrix takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gradprobe_hf.runtime.processes import Processes


@dataclass(frozen=True)
class ShardLayout:
    """How a parameter is split over the processes. Shapes are those of the parameter as it is stored."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def reduce(self, full: Tensor, operation: str) -> Tensor:
        """This process's shard of the `"sum"` or `"max"` of a whole tensor over all processes. A collective."""
        # Redistributing from Partial to Shard is a reduce-scatter: half the traffic of an all-reduce, and DTensor deals
        # out uneven last shards as it does for the parameter.
        part = DTensor.from_local(full, self.mesh, [Partial(operation)] * self.mesh.ndim, run_check=False)
        return part.redistribute(placements=self.placements).to_local()

    def gather(self, part: Tensor) -> Tensor:
        """The whole of a tensor of which each process has the part that is its shard. A collective."""
        strides = torch.empty(self.shape, device="meta").stride()
        is_mask = part.dtype == torch.bool  # as bytes: not every backend gathers it
        part = (part.to(torch.uint8) if is_mask else part).contiguous()
        whole = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=strides
        ).full_tensor()
        return whole.bool() if is_mask else whole


def telling(model: nn.Module, processes: Processes) -> AbstractContextManager[None]:
    """What fails in the body of the `with` in one process fails in all: one that went on to another model would leave
    the rest waiting. Processes that share a model's shards can tell each other nothing in between, but that one is
    lost."""
    return processes.losing() if is_sharded(model) else processes.telling()


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 manages any part of the model. (A DTensor alone may be tensor parallelism.)"""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def plain_class(model: nn.Module) -> type[nn.Module]:
    """The model's own class: `fully_shard` sets `model.__class__` to a generated subclass that is an FSDPModule too."""
    return next(cls for cls in type(model).__mro__ if issubclass(cls, nn.Module) and not issubclass(cls, FSDPModule))


def shard_layout(model: nn.Module, name: str) -> ShardLayout | None:
    """How the parameter is sharded; None if it is not. Ask between passes: during one the parameter may be gathered."""
    parameter = model.get_parameter(name)
    if not isinstance(parameter, DTensor):
        return None
    local, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return ShardLayout(parameter.device_mesh, parameter.placements, tuple(parameter.shape), tuple(local), tuple(offset))


def check_sharding(model: nn.Module) -> None:
    """Raise ValueError for a model that is sharded in a way that cannot be probed."""
    # ZeRO-3 marks its parameters so. It flattens and partitions them, and gathers them through hooks of its own.
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            "the model is partitioned by DeepSpeed ZeRO-3, whose parameters have no data and no shape of their own. "
            "Use FSDP2 (examples/accelerate_fsdp2.yaml), offload (device_map='auto'), or one whole model per process."
        )
    # Without it, a pass that stops half-way, as those for the inputs of a block do, would spoil all that follow.
    if isinstance(model, FSDPModule) and not hasattr(model, "reset_iter_state"):
        raise ValueError(
            f"torch {torch.__version__} cannot make FSDP2 forget a pass (FSDPModule.reset_iter_state): take torch 2.13 "
            "or later, offload (device_map='auto'), or one whole model per process."
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
    """Free gathered parameters, so that every parameter is its shard again.

    The root's stay gathered behind a forward, for the backward that usually follows. Without one they would hide
    whatever is written to the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Parameters are shards when the block is entered and when it exits, even by an exception within a pass."""
    if not is_sharded(model):
        yield
        return
    if isinstance(model, FSDPModule):
        # FSDP reads its parameters' properties once, at its first forward, and keeps them. Run now, before a probe
        # freezes them: otherwise the gradients of a later training would have no dtype.
        model._get_fsdp_state()._lazy_init()
    reshard(model)
    try:
        yield
    except BaseException:
        forget_pass(model)
        raise
    finally:
        reshard(model)


def forget_pass(model: nn.Module) -> None:
    """A pass that stopped half-way leaves gathered parameters, prefetched gathers and states of its backward behind,
    and the next pass would go on from them."""
    if isinstance(model, FSDPModule):
        model.reset_iter_state()


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process. A collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, or the tensor. A view: writing to it writes to the model."""
    with torch.no_grad():  # `to_local` is differentiable, and its result could not be written to in place
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
