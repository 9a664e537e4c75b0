"""An accelerator that waits for the program."""

from __future__ import annotations

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, timed
from gradprobe_hf.profiling.observing.observation import Observation

_BUSY = 0.9  # of a step, from which on there is little to gain


def _idle(seen: Observation) -> list[Finding]:
    assert seen.busy is not None
    if seen.busy >= _BUSY:
        return []
    return [
        finding(
            "idle device",
            None,
            1 - seen.busy,
            f"{seen.device} has work in {seen.busy:.1%} of the traced steps, in which the profiler slows the program "
            "and not the device. To compute less, by leaving checkpointing out say, makes it wait more, not less",
            "give it more at once: larger batches, and fewer passes over the text; then what it waits for, each under "
            "a kind of its own: data loading, synchronization, norms one by one, an optimizer that steps tensor by "
            "tensor. torch.compile joins small kernels: gradprobe profile script ... --fix measures each",
        )
    ]


def _has_device(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    return None if seen.busy is not None else f"no kernel of an accelerator was traced: this run is on {seen.device}"


DEVICE = {"idle device": Check("an accelerator waits for the program", _has_device, _idle)}
