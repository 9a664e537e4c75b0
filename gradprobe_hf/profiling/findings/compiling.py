"""torch.compile: compiling again, and graphs in pieces."""

from __future__ import annotations

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, timed
from gradprobe_hf.profiling.observing.observation import Observation


def _recompilations(seen: Observation) -> list[Finding]:
    return [
        finding(
            "recompilation",
            one.place,
            one.seconds / sum(seen.timed),
            f"compiled {one.count} times in {len(seen.timed)} steps after the warm-up, {one.seconds:.2f} s"
            + (f"; a reason: {one.reason}" if one.reason else ""),
            "keep what the reason names the same: pad to few lengths, pass tensors instead of Python numbers, or "
            "torch.compile(..., dynamic=True)",
        )
        for one in seen.compilations
    ]


def _graph_breaks(seen: Observation) -> list[Finding]:
    return [
        finding(
            "graph break",
            one.place,
            None,
            f"torch.compile ended {one.count} {'graph' if one.count == 1 else 'graphs'} here: {one.reason}. It has no "
            "seconds of its own",
            "take the line out of the compiled function, or run it once in a while; torch.compile(fullgraph=True) "
            "makes each break an error",
        )
        for one in seen.graph_breaks
    ]


COMPILING = {
    "recompilation": Check("torch.compile compiles after the warm-up", timed, _recompilations),
    "graph break": Check("torch.compile cannot compile a line", timed, _graph_breaks),
}
