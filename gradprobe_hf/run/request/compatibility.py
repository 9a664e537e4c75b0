"""Compatibility: whether the matrices of a model can be pruned as configured. What would fail later fails here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.families import block_of, shares_keys_across_blocks
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loading.checks import COMPUTED
from gradprobe_hf.model.parameters import aliases, is_offloaded, is_on_disk, offloaded_parameter
from gradprobe_hf.model.targets import Target
from gradprobe_hf.run.apply import check_whole
from gradprobe_hf.run.request.own_maps import check_known
from gradprobe_hf.run.shapes.budget import check_budget, structures_that_can_go
from gradprobe_hf.run.shapes.structured import check_hands_on, check_routing
from gradprobe_hf.selection.published_rule import thresholds
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.shapes import check_legal


def check_plain(model: PreTrainedModel, config: GradProbeConfig) -> None:
    """Raise ValueError for a model that is quantized still, unless what is to be pruned is named.

    Its quantized maps are no targets, whatever they are stored in (GPTQ, AWQ, bitsandbytes, FP8). Those that were left
    as they were, gates or a vision tower, would be taken for all there is.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not config.include:
        method = quantizer.quantization_config.quant_method
        method = getattr(method, "value", method)
        raise ValueError(
            f"this {type(model).__name__} is quantized ({method}), and quantized weights cannot be pruned. Name the "
            "model that it was made from, or load it dequantized (model.dequantize(), or its quantization_config with "
            "dequantize=True)."
        )


def check_targets(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> None:
    """Raise ValueError for the first matrix that cannot be pruned like this."""
    check_editable(model, targets)
    check_shapes(model, targets, config)
    if config.shape_budget is not None:
        check_budget(model, targets, config)
        return
    if config.drops_blocks:
        check_hands_on(model, targets)
    if config.drops_experts:
        check_routing(model, Plan.of(model, targets, config.amounts))


def check_resumable(config: GradProbeConfig, option: str) -> None:
    """Raise ValueError where a run saves no state that another could go on from."""
    decides = config.needs.accumulates or config.reconstructs or config.structure is not None
    if not (decides or config.recovery_steps):
        raise ValueError(
            f"{option} has no effect here: only probes, weight updates, the choice of structures and recoveries are "
            "resumed, and this configuration has none of them. Leave it out."
        )


def check_shapes(model: nn.Module, targets: Sequence[Target], config: GradProbeConfig) -> None:
    """What `check_targets` can tell without any weight."""
    check_known(model, targets, config)
    if config.group is not None:
        check_group(targets, *config.group)
        check_rows(model, targets, f"pattern={config.pattern!r}")
    if config.structure is not None:
        _check_removable(model, targets, config)
    if config.reconstructs or config.order == "sequential":
        _check_in_blocks(model, targets, remedy=_other_ways(config))
    if config.reconstructs:
        _check_reconstruction(model, targets, config)
    if config.decision_row.filters is not None:
        thresholds(targets, config.gradient_threshold)
    whole = {"order='sequential'": config.order == "sequential", "bounds on matrices": config.bounds is not None}
    for option, used in whole.items():
        if used and is_sharded(model):
            raise ValueError(
                f"{option} is not available for a model that FSDP2 shards: prune it on one process with "
                "device_map='auto' or 'disk', or with one whole model per process."
            )
    if config.group is None and "row" in (config.candidate_scope, config.budget_scope):
        check_rows(model, targets, "scope='row'")


def _check_removable(model: nn.Module, targets: Sequence[Target], config: GradProbeConfig) -> None:
    """Whether the model's code can do without the structures that are to go."""
    if is_sharded(model):
        raise ValueError(
            "structure is not available for a model that FSDP2 shards: prune it on one process with "
            "device_map='auto' or 'disk', or with one whole model per process."
        )
    assert isinstance(model, PreTrainedModel), "it has a configuration"
    if config.weighs_units:
        whole = "structure={'blocks': ...} with update='none', which takes them whole"
        _check_in_blocks(model, targets, remedy=whole, excludes=False)
    try:
        check_legal(model, Plan.of(model, targets, config.amounts))
    except ValueError as error:
        raise ValueError(f"{error}{_instead(model, targets, config)}") from error


def _instead(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> str:
    """What can go of a model that cannot do without all that a configuration names."""
    if any(parameter.is_meta for parameter in model.parameters()) and not is_offloaded(model):
        return ""  # which structures can go is found out by running it
    can = structures_that_can_go(model, targets)
    if config.amounts.keys() <= set(can):  # some of each can, only not as many
        return ""
    if not can:
        return " There is nothing else that it can do without: prune single weights."
    return f" It can do without some of {' and of '.join(map(repr, can))}."


def check_editable(model: nn.Module, targets: Sequence[Target]) -> None:
    """Raise ValueError for the first matrix whose weights cannot be edited: lost, quantized, or not in memory."""
    check_whole(model)
    tied = aliases(model)
    users: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        for own in module._parameters:
            full = f"{name}.{own}" if name else own
            users.setdefault(tied.get(full, full), []).append(name)
    also: dict[str, list[str]] = {}
    for alias, name in tied.items():
        also.setdefault(name, []).append(alias)
    for target in targets:
        _check_editable(model, target, also.get(target.parameter, ()))
        _check_measured(model, target, users[target.parameter])


def check_group(targets: Sequence[Target], n: int, m: int) -> None:
    """Raise ValueError for the first matrix whose rows do not divide into groups of m inputs."""
    for target in targets:
        if target.shape[1] % m:
            raise ValueError(
                f"pattern {n}:{m} cannot hold in {target.name}: its {target.shape[1]} inputs are not divisible by {m}. "
                f"Exclude it with exclude=[{target.role!r}] (--exclude {target.role}), or prune without a pattern."
            )


def check_rows(model: nn.Module, targets: Sequence[Target], option: str) -> None:
    """Raise ValueError where whole rows have to be compared and FSDP2 has dealt the inputs to different processes."""
    for target in targets:
        if is_sharded(model) and target.transposed:
            raise ValueError(
                f"{option} compares the inputs of a row, and those of {target.name} are on different processes (a "
                "Conv1D is sharded by inputs). Prune over 'global', 'block' or 'tensor', or on one process."
            )


def _other_ways(config: GradProbeConfig) -> str:
    """What to set in place of all that works on one block after the other."""
    joint = "order='joint' (--order joint)" if config.order == "sequential" else ""
    kept = "update='none' (--update none), which changes no kept weight" if config.updates else ""
    refined = "refinement='none' (--refinement none)" if config.refines else ""
    return " and ".join(filter(None, (joint, kept, refined)))


def _check_in_blocks(model: nn.Module, targets: Sequence[Target], remedy: str, excludes: bool = True) -> None:
    """Args: `remedy`: what to set in place; `excludes`: whether single matrices can be left out."""
    if shares_keys_across_blocks(model):
        raise ValueError(
            f"blocks of {type(model).__name__} read keys and values that others have computed (num_kv_shared_layers), "
            f"so they cannot be worked on one after the other: set {remedy}."
        )
    for target in targets:
        if not target.block:
            raise ValueError(
                f"{target.name} lies outside of the blocks, which are worked on one after the other here: leave it out "
                f"of include, or set {remedy}."
            )
        users = sorted({block_of(model, site.module) for site in target.sites})
        if len(users) > 1:
            raise ValueError(
                f"{target.name} is shared by {len(users)} blocks ({', '.join(users)}), which are worked on one after "
                f"the other here: {'exclude it, or ' if excludes else ''}set {remedy}."
            )


def _check_reconstruction(model: nn.Module, targets: Sequence[Target], config: GradProbeConfig) -> None:
    if config.refines and is_sharded(model):
        raise ValueError(
            f"refinement={config.refinement!r} trains whole blocks, and FSDP2 shards this model: set refinement='none' "
            "(--refinement none), or prune it on one process with device_map='auto' or 'disk', or with one whole model "
            "per process."
        )
    for target in targets:
        if any(site.kind == "embedding" for site in target.sites):
            raise ValueError(
                f"{target.name} is an embedding: its outputs are no linear map of inputs that could be reconstructed. "
                "Exclude it, or set update='none' (--update none)."
            )


def _check_editable(model: nn.Module, target: Target, other_names: Sequence[str]) -> None:
    weight = model.get_parameter(target.parameter)
    if isinstance(weight, DTensor) and target.expert is not None:
        raise ValueError(
            f"{target.name} is an expert of a model that FSDP2 shards: its processes would reach different experts. "
            "Prune it on one process with device_map='auto', or with one whole model per process."
        )
    if weight.dtype not in COMPUTED or type(weight.data) not in (torch.Tensor, DTensor):
        raise ValueError(
            f"{target.name} is stored as {weight.dtype} ({type(weight).__name__}): quantized weights cannot be pruned. "
            "Load the model as it was before, or dequantized (model.dequantize(), or its quantization_config with "
            "dequantize=True), or exclude this matrix."
        )
    if weight.is_meta and offloaded_parameter(model, target.parameter) is None:
        raise ValueError(
            f"{target.name} has no data (meta device) and no Accelerate hook says where it is kept. Load the model "
            "with from_pretrained, or offload it with device_map, cpu_offload or disk_offload."
        )
    for alias in other_names:
        if is_on_disk(model, alias) != is_on_disk(model, target.parameter):
            raise ValueError(
                f"{target.parameter} and {alias} are one weight, and only one of them is offloaded to disk: put both "
                "on one device in the device_map, or exclude this matrix."
            )


def _check_measured(model: nn.Module, target: Target, users: Sequence[str]) -> None:
    """Every module that has the weight must be one that is measured: tied weights may be used in a way of their own."""
    known = {site.module for site in target.sites}
    for name in users:
        if name not in known:
            raise ValueError(
                f"{target.name} is also used by {name} ({type(model.get_submodule(name)).__name__}), whose forward is "
                "its own, so it cannot be measured; exclude this matrix."
            )
