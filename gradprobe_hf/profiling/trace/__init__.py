"""Traces of torch.profiler, recorded anywhere, into an observation of what they hold."""

from gradprobe_hf.profiling.trace.read import read_trace

__all__ = ["read_trace"]
