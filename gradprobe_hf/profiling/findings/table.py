"""Every kind of finding. No other code asks which kind it is.

A check is a pure function: one observation gives the same findings each time. Shares are of steps that were only timed.
"""

from __future__ import annotations

from gradprobe_hf.profiling.findings.compiling import COMPILING
from gradprobe_hf.profiling.findings.device import DEVICE
from gradprobe_hf.profiling.findings.finding import Check, Finding
from gradprobe_hf.profiling.findings.lines import LINES
from gradprobe_hf.profiling.findings.loading import LOADING
from gradprobe_hf.profiling.findings.memory import MEMORY
from gradprobe_hf.profiling.findings.ranks import RANKS
from gradprobe_hf.profiling.findings.stepping import STEPPING
from gradprobe_hf.profiling.observing.observation import Observation

CHECKS: dict[str, Check] = {**LINES, **LOADING, **COMPILING, **STEPPING, **MEMORY, **DEVICE, **RANKS}


def findings_of(observation: Observation) -> tuple[list[Finding], dict[str, str]]:
    """All findings, the dearest first, and the kinds that this observation cannot tell -> why."""
    asked = {kind: observation.missing.get(kind) or check.unknown(observation) for kind, check in CHECKS.items()}
    unknown = {kind: why for kind, why in asked.items() if why}
    found = [one for kind, check in CHECKS.items() if kind not in unknown for one in check.find(observation)]
    return sorted(found, key=_dearest_first), unknown


def _dearest_first(one: Finding) -> tuple[float, str, str, int]:
    return -(one.share if one.share is not None else -1.0), one.kind, one.file or "", one.line or 0
