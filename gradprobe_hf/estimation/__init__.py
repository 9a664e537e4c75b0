"""Estimation: what a run will take, before any of it."""

from gradprobe_hf.estimation.estimate import Estimate, Work, accumulator_bytes, estimate
from gradprobe_hf.estimation.footprint import Item, Placement, Stage
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.estimation.passes import activation_bytes

__all__ = [
    "Estimate",
    "Item",
    "Placement",
    "Stage",
    "Work",
    "accumulator_bytes",
    "activation_bytes",
    "available_bytes",
    "estimate",
]
