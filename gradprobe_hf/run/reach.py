"""Reach: which targets the calibration says anything about. What it does not reach is no target.

Text alone says nothing about a vision tower. Pruned without evidence it would be ruined; kept without evidence it would
leave the whole budget to the language model, at twice the sparsity that was asked for. So it is left out of both.

One forward and backward pass over a single batch usually tells: by default 1/32 of a probe, 128 samples in batches of
4. The probe makes it again, because its accumulators are of the targets that this leaves. Further batches are run only
while something is unreached. An expert that is sent no token is another matter: more text would send it some, and its
fused parameter is reached with the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from gradprobe_hf.model.families import expert_kind
from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.model.targets import Target, matches, patterns_of
from gradprobe_hf.probe.engine import ProbePass, Workload, reached_inputs, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.request.compatibility import check_targets
from gradprobe_hf.tasks.table import OF_MEDIA

logger = logging.getLogger(__name__)

LEAST_REACHED = 0.5  # of the weights that were asked about: with less, the budget was meant for something else


def reachable(context: RunContext) -> RunContext:
    """The context without the targets that no calibration batch reaches; those are its `unreached`.

    Reached means: by a gradient of the loss, where the method probes, else by a forward pass. All processes run the
    same batches. A method that reads no text takes all targets as they are.

    Raises:
        ValueError: less than half of the weights are reached, or nothing of what an `include` pattern names; a block
            that is not, where whole structures go; and what a probe raises.
    """
    if context.config.needs.passes == "none":
        return context
    with context.stopwatch("reach"):
        kinds = _reached_kinds(context)
    reached = tuple(target for target in context.targets if _kind(target) in kinds)
    unreached = tuple(target for target in context.targets if _kind(target) not in kinds)
    if not unreached:
        return context
    if context.config.structure is not None:
        _check_blocks_reached(context, reached)
    _check_reached(context, reached, unreached)
    check_targets(context.model, reached, context.config)  # a pattern of thresholds may name the others alone
    if context.processes.is_main:
        logger.warning(left_out(reached, unreached, context.calibration))
    return replace(context, targets=reached, unreached=unreached)


def left_out(reached: Sequence[Target], unreached: Sequence[Target], calibration: Iterable[Batch]) -> str:
    """What is said where matrices are left out of the budget."""
    share = _weights(unreached) / (_weights(reached) + _weights(unreached))
    is_text = not any(name.startswith(OF_MEDIA) for batch in calibration for name in batch)
    return (
        f"{len(unreached)} matrices ({_sample(unreached)}), {share:.1%} of the weights that were asked about, are not "
        "pruned and not part of the budget: the calibration data does not reach them. To prune them, calibrate on what "
        f"does{': images or audio beside the text, say' if is_text else ''}."
    )


def _reached_kinds(context: RunContext) -> set[str]:
    """The kinds of matrices that some batch reaches, the same in all processes."""
    wanted = list(dict.fromkeys(map(_kind, context.targets)))
    kinds: set[str] = set()
    with context.workload.telling():
        for names in _reached_by_batch(context):
            kinds |= {_kind(target) for target in context.targets if target.name in names}
            if kinds == set(wanted):
                break
    # Every process has run the same batches, but a tie in a router may fall differently on different devices.
    flags = context.processes.max_(torch.tensor([kind in kinds for kind in wanted], dtype=torch.int64))
    return {kind for kind, flag in zip(wanted, flags.tolist(), strict=True) if flag}


def _reached_by_batch(context: RunContext) -> Iterator[set[str]]:
    """Names of the targets that each calibration batch reaches."""
    for batch in context.calibration:
        work = Workload(context.model, [batch], context.loss_fn, context.checkpointing, progress=False)
        yield (
            _by_gradients(work, context.targets)
            if context.config.needs.probes
            else reached_inputs(work, context.targets)
        )


def _by_gradients(work: Workload, targets: Sequence[Target]) -> set[str]:
    # Statistics without terms: nothing is summed, and what they call reached is what a probe will call so.
    statistics = Statistics(targets, frozenset(), work.model)
    run_probe(work, ProbePass(targets, statistics, label="the first pass"))
    return {target.name for target in targets} - set(statistics.unreached)


def _check_reached(context: RunContext, reached: Sequence[Target], unreached: Sequence[Target]) -> None:
    for pattern in context.config.include:
        named = [target for target in context.targets if _names(pattern, target)]
        if named and not set(named) & set(reached):
            raise ValueError(
                f"include={pattern!r} asks for {len(named)} matrices that no calibration batch reaches "
                f"({_sample(named)}): nothing is known about them. Calibrate on what reaches them (images, audio, "
                "labels), or leave the pattern out."
            )
    share = _weights(reached) / (_weights(reached) + _weights(unreached))
    if share >= LEAST_REACHED:
        return
    remedy = "Calibrate on what reaches them (images, audio, labels)"
    if reached:
        patterns = patterns_of(context.model, reached)
        flags = " ".join(f"--include '{pattern}'" for pattern in patterns)
        remedy += f", or ask for what is reached by name: include={patterns} ({flags})"
    raise ValueError(
        f"the calibration data reaches {len(reached)} of {len(context.targets)} matrices, {share:.0%} of the weights "
        f"that would be pruned; it does not reach {_sample(unreached)}. {remedy}."
    )


def _check_blocks_reached(context: RunContext, reached: Sequence[Target]) -> None:
    """All blocks are cut alike, and nothing is known about one whose output the loss does not depend on."""
    blocks = dict.fromkeys(target.block for target in context.targets)
    missing = [block for block in blocks if block not in {target.block for target in reached}]
    if missing:
        raise ValueError(
            f"structure cuts all blocks alike, and the calibration does not reach {', '.join(missing[:3])}, on whose "
            "output the loss does not depend. Calibrate on what reaches all of them, or prune without structure."
        )


def _names(pattern: str, target: Target) -> bool:
    return any(matches(pattern, name) for name in (target.parameter, *(site.module for site in target.sites)))


def _kind(target: Target) -> str:
    return expert_kind(target.parameter)


def _weights(targets: Sequence[Target]) -> int:
    return sum(target.numel for target in targets)


def _sample(targets: Sequence[Target]) -> str:
    names = list(dict.fromkeys(target.parameter for target in targets))
    return ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
