"""gradprobe_hf: prune pretrained Hugging Face models by asking their gradients.

from gradprobe_hf import GradProbeConfig, prune_pretrained

result = prune_pretrained("HuggingFaceTB/SmolLM2-135M", GradProbeConfig(sparsity=0.5), calibration="pydoc")
result.save_pretrained("smollm2-50")
"""

from gradprobe_hf import metrics
from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.comparison import compare_pretrained
from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.pruning import prune_pretrained
from gradprobe_hf.report.report import Report
from gradprobe_hf.run.inputs import Loading
from gradprobe_hf.threshold_sweep import sweep_gradient_thresholds

__all__ = [
    "GradProbeConfig",
    "Loading",
    "PruneResult",
    "Report",
    "compare_pretrained",
    "metrics",
    "prune_pretrained",
    "sweep_gradient_thresholds",
]
