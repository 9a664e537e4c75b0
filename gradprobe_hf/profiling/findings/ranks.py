"""Several processes: what they tell each other, and who waits for whom."""

from __future__ import annotations

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, milliseconds, timed, traced
from gradprobe_hf.profiling.observing.observation import Observation, RankStages

_UNEVEN = 0.05  # of a step; processes that do the same differ by less
# Of a step, what stands before the first collective of backward. The others wait there for the slowest.
_BEFORE = ("data loading", "forward", "other")


def _collectives(seen: Observation) -> list[Finding]:
    assert seen.collectives is not None
    if not seen.collectives:
        return []
    return [
        finding(
            "collectives",
            None,
            seen.collectives,
            f"a collective{_of_processes(seen)} was under way in {seen.collectives:.1%} of the traced steps; "
            "backward hides a part of it",
            "accumulate batches without one (accelerator.accumulate, no_sync()); send gradients in half precision "
            "(a communication hook of DistributedDataParallel); make buckets larger (bucket_cap_mb)",
        )
    ]


def _imbalance(seen: Observation) -> list[Finding]:
    slowest, fastest = max(seen.ranks, key=_own), min(seen.ranks, key=_own)
    step = sum(slowest.stages.values())
    share = (_own(slowest) - _own(fastest)) / step
    if share < _UNEVEN:
        return []
    stage = max(_BEFORE, key=lambda name: slowest.stages[name] - fastest.stages[name])
    return [
        finding(
            "imbalance between ranks",
            None,
            share,
            f"before backward, rank {slowest.rank} takes {milliseconds(_own(slowest))} and rank {fastest.rank} "
            f"{milliseconds(_own(fastest))}, which then waits; the difference is in {stage}",
            "give each process as many tokens, not only as many rows (group by length), and the same work beside them",
        )
    ]


def _of_processes(seen: Observation) -> str:
    """A trace need not say how many there are."""
    return f" of {seen.processes} processes" if seen.processes > 1 else ""


def _own(rank: RankStages) -> float:
    return sum(rank.stages[stage] for stage in _BEFORE)


def _several(seen: Observation) -> str | None:
    if reason := traced(seen):
        return reason
    return "there is one process" if seen.collectives is None else None


def _all_told(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    if seen.processes == 1:
        return "there is one process"
    return None if seen.ranks else "the run ended before its processes told of their steps"


RANKS = {
    "collectives": Check("processes exchange gradients", _several, _collectives),
    "imbalance between ranks": Check("one process waits for another", _all_told, _imbalance),
}
