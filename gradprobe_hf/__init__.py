"""gradprobe_hf: prune pretrained Hugging Face models using gradients of their loss.

from gradprobe_hf import GradProbeConfig, prune_pretrained

result = prune_pretrained("HuggingFaceTB/SmolLM2-135M", GradProbeConfig(sparsity=0.5))
result.save_pretrained("smollm2-50")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradprobe_hf.bench.bench import bench_pretrained
    from gradprobe_hf.checkpoint.result import PruneResult
    from gradprobe_hf.comparison.compare import compare_pretrained
    from gradprobe_hf.config.config import GradProbeConfig
    from gradprobe_hf.config.recovery import RecoveryConfig
    from gradprobe_hf.evaluation import metrics
    from gradprobe_hf.pruning import prune_pretrained
    from gradprobe_hf.recovery.recover import recover_pretrained
    from gradprobe_hf.recovery.result import RecoverResult
    from gradprobe_hf.report.report import Report
    from gradprobe_hf.threshold_sweep.sweep import sweep_gradient_thresholds

__all__ = [
    "GradProbeConfig",
    "PruneResult",
    "RecoverResult",
    "RecoveryConfig",
    "Report",
    "bench_pretrained",
    "compare_pretrained",
    "metrics",
    "prune_pretrained",
    "recover_pretrained",
    "sweep_gradient_thresholds",
]

# Where each public name is defined. They are imported when they are asked for: torch and transformers take seconds.
_DEFINED_IN = {
    "GradProbeConfig": "gradprobe_hf.config.config",
    "PruneResult": "gradprobe_hf.checkpoint.result",
    "RecoverResult": "gradprobe_hf.recovery.result",
    "RecoveryConfig": "gradprobe_hf.config.recovery",
    "Report": "gradprobe_hf.report.report",
    "bench_pretrained": "gradprobe_hf.bench.bench",
    "compare_pretrained": "gradprobe_hf.comparison.compare",
    "prune_pretrained": "gradprobe_hf.pruning",
    "recover_pretrained": "gradprobe_hf.recovery.recover",
    "sweep_gradient_thresholds": "gradprobe_hf.threshold_sweep.sweep",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gradprobe_hf")
    if name == "metrics":
        return import_module("gradprobe_hf.evaluation.metrics")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_DEFINED_IN[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
