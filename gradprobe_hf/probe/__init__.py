"""The probe: forward and backward passes that measure, at the original or at tentatively shrunk weights.

`engine` runs the passes, `attachment` routes a model's matrices through the maps of `measured`, which measure
themselves and fold (`folding`) into `statistics`: for each `matrix` a few sums in `accumulators`, which are kept in
`row_stores`. Weights never require a gradient and are never modified.
"""

from gradprobe_hf.probe.attachment import attached, serving
from gradprobe_hf.probe.engine import ProbeLoss, Tally, observe_inputs, own_steps, run_probe, share
from gradprobe_hf.probe.folding import Probe
from gradprobe_hf.probe.matrix import ALL, Keeping, MatrixStatistics, Term
from gradprobe_hf.probe.row_stores import Trail
from gradprobe_hf.probe.statistics import Statistics

__all__ = [
    "ALL",
    "Keeping",
    "MatrixStatistics",
    "Probe",
    "ProbeLoss",
    "Statistics",
    "Tally",
    "Term",
    "Trail",
    "attached",
    "observe_inputs",
    "own_steps",
    "run_probe",
    "serving",
    "share",
]
