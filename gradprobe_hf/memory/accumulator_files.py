"""Where accumulators are kept for the length of a run; their files, if they are on disk, are gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.values import AccumulatorDevice
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.estimation.sizes import accumulator_bytes
from gradprobe_hf.model.parameters import is_on_disk
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.accumulation.page_cache import PageCacheTrail
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage
from gradprobe_hf.runtime.scratch import remove_scratch, scratch_folder

CACHE_SHARE = 0.7  # of free memory: a run takes some itself


@contextmanager
def accumulator_files(
    model: PreTrainedModel,
    targets: Sequence[Target],
    config: GradProbeConfig,
    folder: Path | None,
    device: AccumulatorDevice,
) -> Iterator[AccumulatorStorage]:
    """How accumulators are kept; their files, if they are on disk, are gone afterwards.

    Args:
        folder: for the files; None: a temporary one.
        device: where they are kept: what `accumulator_device="auto"` has come to.

    Raises:
        OSError: the folder cannot be written.
    """
    if device != "disk":
        yield AccumulatorStorage(config.accumulator_dtype, device)
        return
    own = scratch_folder("accumulators", folder)
    try:
        page_cache = PageCacheTrail() if outgrows_cache(model, targets, config) else None
        yield AccumulatorStorage(config.accumulator_dtype, "disk", own, page_cache)
    finally:
        remove_scratch(own)


def outgrows_cache(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> bool:
    """Whether the accumulators and the weights that are read from disk are more than memory has room for."""
    weights = sum(value.nbytes for name, value in model.named_parameters() if is_on_disk(model, name))
    files = weights + accumulator_bytes(config, sum(target.numel for target in targets))
    return files > CACHE_SHARE * available_bytes(torch.device("cpu"))
