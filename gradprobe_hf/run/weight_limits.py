"""Limits for `device_map="auto"`: what weights may fill of each device, so that the run has room beside them.

Accelerate's own limits are those of a model that only generates; and they do not see that of a container.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.footprint import Placement
from gradprobe_hf.estimation.machine import available_bytes, process_bytes
from gradprobe_hf.model.targets import find_targets

logger = logging.getLogger(__name__)

Limits = dict[int | str, int]


def weight_limits(model: PreTrainedModel, config: GradProbeConfig) -> Limits | None:
    """Bytes of weights for each GPU, by its number, and for `"cpu"`; None: nothing is computed beside them.

    Weights are read before anything can be measured: this is the estimate's part. Where all of them have room beside
    what a resident run takes, they get it; else what an offloaded run leaves, which takes less.

    Args:
        model: on the meta device, in the dtype it will be loaded in.
    """
    if config.needs.passes == "none":
        return None
    if config.shape_budget is not None:  # its shapes are found on the way; the run takes as much for each
        config = config.varied(structure={"blocks": 1}, params=None, memory=None, latency=None)
    if config.accumulator_device == "auto":  # statistics leave before weights do: they are read less often
        config = config.varied(accumulator_device="disk")
    targets = find_targets(model, config.include, config.exclude)
    found = {one.name: one for one in estimate(model, targets, config, base=process_bytes()).placements}
    whole = found["resident" if config.checkpointing is False else "checkpointed"]
    limits = _limits(whole if whole.fits else found["offloaded"])
    logger.info("weights may take %s", ", ".join(f"{size / 1e9:.3g} GB of {place}" for place, size in limits.items()))
    return limits


def _limits(placement: Placement) -> Limits:
    limits: Limits = {"cpu": max(0, placement.room["host"] - placement.beside_weights("host"))}
    if "accelerator" in placement.room:
        beside = placement.beside_weights("accelerator")
        for index in range(torch.cuda.device_count()):
            limits[index] = max(0, available_bytes(torch.device("cuda", index)) - beside)
    return limits
