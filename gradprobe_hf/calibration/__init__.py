"""Calibration and evaluation data: whatever a user names -> the same batches, in the same order, each time.

Calibration sets are small (a few hundred windows), so `Batches` keeps them in memory: that is what makes both probes
see the same tokens even if the user's DataLoader shuffles.
"""

from gradprobe_hf.calibration.batches import Batches, shared_rows
from gradprobe_hf.calibration.loading import EVALUATION_SEED, load_batches

__all__ = ["EVALUATION_SEED", "Batches", "load_batches", "shared_rows"]
