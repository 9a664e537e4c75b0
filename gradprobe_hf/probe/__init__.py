"""The probe: forward and backward passes that measure, at the original or at tentatively shrunk weights.

`engine` runs the passes, `measured` holds the linear maps that measure themselves, `statistics` what they fold into,
`modes` the temporary changes to a model. Weights never require a gradient and are never modified.
"""

from gradprobe_hf.probe.engine import ProbeLoss, observe_inputs, run_probe, serving
from gradprobe_hf.probe.statistics import MatrixStatistics, Statistics, Term

__all__ = ["MatrixStatistics", "ProbeLoss", "Statistics", "Term", "observe_inputs", "run_probe", "serving"]
