"""Out of memory: the stage it happened in, and the settings that would help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils.memory import should_reduce_batch_size

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES
from gradprobe_hf.scores.terms import matrix_terms


@contextmanager
def memory_errors(stopwatch: Stopwatch, remedies: list[str]) -> Iterator[None]:
    """Out of memory, with the stage it happened in and the first three settings that would help."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        stage = stopwatch.failed or "loading"
        advice = "; ".join(f"{number}. {remedy}" for number, remedy in enumerate(remedies[:3], start=1))
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryError(
            f"out of memory in the stage {stage!r}: {said}. "
            f"The model is as it was. What would help, in this order: {advice}."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """On an accelerator, or in the memory of the host."""
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))


def remedies_for(config: GradProbeConfig, batch_size: int, checkpointing: bool, offloaded: bool) -> list[str]:
    """Settings that take less memory than the ones in use, those that cost the least time first."""
    found = []
    if batch_size > 1:
        found.append("batch_size=1 (--batch-size 1)")
    if not checkpointing:
        found.append("checkpointing=True (--checkpointing on)")
    if config.accumulator_dtype != "int8":
        found.append("accumulator_dtype='int8' (--accumulator-dtype int8)")
    if not offloaded:
        found.append("device_map='disk' (--device-map disk)")
    if config.accumulator_device != "disk":
        found.append("accumulator_device='disk' (--accumulator-device disk)")
    lean = [name for name, row in FISHER_ESTIMATES.items() if not matrix_terms(row.terms)]
    if config.uses_fisher and config.fisher not in lean:
        found += [f"fisher={name!r} (--fisher {name})" for name in lean]
    return [*found, "a shorter sequence_length (--sequence-length)"]
