"""Memory that could be spent on speed."""

from __future__ import annotations

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, gigabytes, located, timed
from gradprobe_hf.profiling.observing.observation import Observation

_ROOM = 0.5  # of the device's memory, free at the worst moment that was seen: then there is something to try


def _recomputation(seen: Observation) -> list[Finding]:
    assert seen.setup is not None
    free = _least_free(seen)
    if not seen.recomputed or free is None or free < _taken(seen):
        return []
    layers = f"{seen.setup.checkpointed} layers are" if seen.setup.checkpointed else "something is"
    return [
        finding(
            "checkpointing",
            None,
            seen.recomputed,
            f"{layers} computed again in backward, by a clock on each module; {gigabytes(free)} were free at the end "
            f"of the fullest step, more than is in use",
            "checkpointing=False, or 'auto', which keeps it where activations do not fit (--checkpointing auto)"
            if seen.run
            else "model.gradient_checkpointing_disable(), gradient_checkpointing=False in TrainingArguments; if the "
            "activations do not fit then, checkpoint every second layer",
        )
    ]


def _headroom(seen: Observation) -> list[Finding]:
    used, total = _used_of(seen)
    if used >= (1 - _ROOM) * total:
        return []
    samples = f" with {seen.contents.samples / seen.contents.steps:.3g} samples" if seen.contents else ""
    return [
        finding(
            "batch headroom",
            None,
            None,
            f"a step{samples} takes {gigabytes(used)} of {gigabytes(total)} at its peak; what a larger batch gains is "
            "not known before it is tried",
            "batch_size='auto' takes the largest that fits (--batch-size auto); --batch-size behind the -- of "
            "gradprobe profile prune measures one"
            if seen.run
            else "try twice the batch: gradprobe profile script ... --fix measures it beside this one",
        )
    ]


def _used_of(seen: Observation) -> tuple[int, int]:
    """Bytes of an accelerator at the peak of a step, and in all; of a pruning run on a CPU those of the process."""
    if any(one.peak is not None for one in seen.memory):
        used = max(one.peak or 0 for one in seen.memory)
        return used, used + min(one.free + (one.reserved or 0) - (one.peak or 0) for one in seen.memory)
    used = max([one.process for one in seen.memory] + [one.process for one in seen.run])
    return used, max(one.process + one.free for one in seen.memory)


def _least_free(seen: Observation) -> int | None:
    return min((one.free for one in seen.memory), default=None)


def _taken(seen: Observation) -> int:
    return max(one.reserved if one.reserved is not None else one.process for one in seen.memory)


def _recomputed(seen: Observation) -> str | None:
    if reason := located(seen):
        return reason
    if seen.setup is None or not any(one.free for one in seen.memory):
        return f"the free memory of {seen.device} is not known"
    return None


def _on_device(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    # The memory of a CPU is there for all; but a pruning run takes what it has for its batches.
    known = any(one.peak is not None or (seen.run and one.free) for one in seen.memory)
    return (
        None if known else f"it takes the memory of an accelerator that a step needs, and this run is on {seen.device}"
    )


MEMORY = {
    "checkpointing": Check("activations are computed again while memory is free", _recomputed, _recomputation),
    "batch headroom": Check("a larger batch would fit", _on_device, _headroom),
}
