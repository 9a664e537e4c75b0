"""Profiling: a training loop into where its time goes, and which of its lines waste some."""

from gradprobe_hf.profiling.callback import ProfileCallback
from gradprobe_hf.profiling.observing.schedule import Schedule
from gradprobe_hf.profiling.profiled import Profiler, profiled
from gradprobe_hf.profiling.report import ProfileReport

__all__ = ["ProfileCallback", "ProfileReport", "Profiler", "Schedule", "profiled"]
