"""Findings: an observation into what it shows to be wasted, and what it cannot tell."""

from gradprobe_hf.profiling.findings.finding import Check, Finding
from gradprobe_hf.profiling.findings.table import CHECKS, findings_of

__all__ = ["CHECKS", "Check", "Finding", "findings_of"]
