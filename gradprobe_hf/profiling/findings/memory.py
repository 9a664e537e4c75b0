"""Memory that could be spent on speed."""

from __future__ import annotations

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, gigabytes, located, timed
from gradprobe_hf.profiling.observing.observation import BatchSize, Observation

_ROOM = 0.5  # of the device's memory, free at the worst moment that was seen: then there is something to try
_SHORT = 0.1  # of the memory, free at the worst moment: then a model should keep less
_FASTER = 1.05  # times as many samples a second; less is no reason for another batch
_LARGER_IN_RUN = (
    "batch_size='auto' takes the largest that fits (--batch-size auto); --batch-size after the -- of gradprobe "
    "profile prune measures one"
)


def _recomputation(seen: Observation) -> list[Finding]:
    free = _least_free(seen)
    assert free is not None
    if not seen.recomputed:
        return _without_recomputation(seen, free)
    if free < _taken(seen):
        return []
    assert seen.setup is not None
    layers = f"{seen.setup.checkpointed} layers are" if seen.setup.checkpointed else "something is"
    return [
        finding(
            "checkpointing",
            None,
            seen.recomputed,
            f"{layers} computed again in backward, by a clock on each module; {gigabytes(free)} were free at the end "
            f"of the fullest step, more than is in use{_other_way(seen)}",
            "checkpointing=False, or 'auto', which keeps it where activations do not fit (--checkpointing auto)"
            if seen.run
            else "model.gradient_checkpointing_disable(), gradient_checkpointing=False in TrainingArguments (gradprobe "
            "profile script ... --fix checkpointing measures it); if the activations do not fit then, checkpoint every "
            "second layer",
        )
    ]


def _without_recomputation(seen: Observation, free: int) -> list[Finding]:
    """Where memory is short, and a model could keep less."""
    assert seen.setup is not None
    if free >= _SHORT * (free + _taken(seen)) or not seen.setup.attention:
        return []
    return [
        finding(
            "checkpointing",
            None,
            None,
            f"{gigabytes(free)} were free at the fullest, {gigabytes(_taken(seen))} are in use, and no layer is "
            f"computed again in backward{_other_way(seen)}",
            "checkpointing=True (--checkpointing on), or a smaller batch"
            if seen.run
            else "model.gradient_checkpointing_enable(), gradient_checkpointing=True in TrainingArguments: gradprobe "
            "profile script ... --fix checkpointing measures its memory and time",
        )
    ]


def _other_way(seen: Observation) -> str:
    """What was measured of a pass with checkpointing switched."""
    other = seen.other_checkpointing
    if other is None or other.gain is None or other.memory is None or not seen.batches[0].memory:
        return ""
    switched = "without" if seen.checkpointing else "with"
    return (
        f". {switched.capitalize()} it, a pass takes {gigabytes(other.memory)} where it took "
        f"{gigabytes(seen.batches[0].memory)}, and {other.gain:.2f} times as many sequences a second"
    )


def _headroom(seen: Observation) -> list[Finding]:
    return _measured_headroom(seen) if seen.batches else _presumed_headroom(seen)


def _measured_headroom(seen: Observation) -> list[Finding]:
    """If a larger batch was faster: what each took and gained, and the largest that fits."""
    fitting = _fitting(seen)
    faster = [one for one in fitting if one.pays and (one.gain or 0.0) >= _FASTER]
    if not faster:
        return []
    best = max(faster, key=lambda one: one.gain or 0.0)
    largest = fitting[-1]
    gains = ", ".join(f"{one.times}x {one.gain:.2f}" for one in fitting if one.gain is not None)
    room = f" of {gigabytes(largest.room)}" if largest.room else ""
    taken = f", {gigabytes(largest.memory)}{room} at its peak" if largest.memory else ""
    return [
        finding(
            "batch headroom",
            None,
            None,
            f"samples a second, as times those of this batch: {gains}. The largest that was tried is {largest.times}x"
            f"{taken}; {seen.batch_limit}",
            f"batch_size={best.samples:g} (--batch-size {best.samples:g}), which was fastest"
            if seen.run
            else f"a batch {best.times} times as large was fastest; another batch is another training: the learning "
            "rate may need a change",
        )
    ]


def _presumed_headroom(seen: Observation) -> list[Finding]:
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
            _LARGER_IN_RUN
            if seen.run
            else "gradprobe profile script ... --fix largest-batch looks for the largest "
            "that fits, and measures larger ones beside this one",
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


def _sized(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    if seen.batches:
        return None if len(_fitting(seen)) > 1 else f"no larger batch could be measured: {seen.batch_limit}"
    # The memory of a CPU is there for all; but a pruning run takes what it has for its batches.
    if any(one.peak is not None or (seen.run and one.free) for one in seen.memory):
        return None
    return (
        f"on {seen.device} a step does not tell what a batch takes: gradprobe profile script ... --fix largest-batch "
        "runs larger ones"
    )


def _fitting(seen: Observation) -> list[BatchSize]:
    return [one for one in seen.batches if one.failed is None]


MEMORY = {
    "checkpointing": Check(
        "activations are computed again while memory is free, or are kept where it is not", _recomputed, _recomputation
    ),
    "batch headroom": Check("a larger batch would fit", _sized, _headroom),
}
