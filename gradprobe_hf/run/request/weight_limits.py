"""Limits for `device_map="auto"`: what weights may fill of each device, so that the run has room beside them.

Accelerate's own limits are those of a model that only generates; and they do not see that of a container.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.footprint import Device
from gradprobe_hf.estimation.machine import available_bytes, process_bytes
from gradprobe_hf.model.targets import find_targets

logger = logging.getLogger(__name__)

Limits = dict[int | str, int]


def weight_limits(model: PreTrainedModel, config: GradProbeConfig, processes: int = 1) -> Limits | None:
    """Bytes of weights for each GPU, by its number, and for `"cpu"`; None: Accelerate's own limits will do.

    Weights are read before anything can be measured: this is the estimate's part. Where all of them have room beside
    what a resident run takes, nothing has to be left free; else what an offloaded run takes, which is less.

    Args:
        model: on the meta device, in the dtype it will be loaded in.
        processes: that have weights each, in one memory.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Limits name every device there is, and of others than CUDA's nothing is known: Accelerate would leave them out.
    is_known = accelerator is None or accelerator.type == "cuda"
    # What structure="auto" takes is found out on the way: no estimate is made of it.
    if config.needs.passes == "none" or config.shape_budget is not None or not is_known:
        return None
    # Statistics leave before weights do: they are read less often.
    if config.accumulator_device == "auto" and config.needs.accumulates:
        config = config.varied(accumulator_device="disk")
    targets = find_targets(model, config.include, config.exclude)
    found = {one.name: one for one in estimate(model, targets, config, base=process_bytes()).placements}
    whole = found["resident" if config.checkpointing is False else "checkpointed"]
    memories: list[Device] = [device for device in whole.room if device != "disk"]
    offloaded = found.get("offloaded")  # none of a run with a recovery, which trains weights that are in memory
    if offloaded is None or all(whole.needed(device) <= whole.room[device] // processes for device in memories):
        beside = dict.fromkeys(memories, 0)  # Accelerate keeps room for the largest layer besides
    else:
        beside = {device: offloaded.beside_weights(device) for device in memories}
    limits: Limits = {"cpu": max(0, whole.room["host"] // processes - beside["host"])}
    for index in range(torch.cuda.device_count()):
        limits[index] = max(0, available_bytes(torch.device("cuda", index)) - beside["accelerator"])
    logger.info("weights may take %s", ", ".join(f"{size / 1e9:.3g} GB of {place}" for place, size in limits.items()))
    return limits
