"""The rows and columns of `quality.py`: what each method is as a configuration."""

from __future__ import annotations

import argparse
from typing import Any

from gradprobe_hf import GradProbeConfig

OBS, ADMM = {"reconstruction": "obs"}, {"reconstruction": "admm"}
AND = " + "  # a decision and a reconstruction: those with one decision share its masks
RULE = "threshold rule"
THRESHOLD = {"strategy": "wanda", "decision": "threshold", "gradient_threshold": 1.0}
AS_SPARSE = ", as sparse as the threshold rule"
RIVALS = {method + AS_SPARSE: method for method in ("wanda", "sparsegpt", "two probes")}
RULE_ROWS = (RULE, RULE + " + obs", *RIVALS)  # all at what the rule came to, not at their column's sparsity

# Wanda is first: it rounds its budget in every row, so the others are asked for exactly the zeros that it made.
# Magnitude is compared within rows too, where it does better than over a matrix or the whole model.
METHODS: dict[str, dict[str, Any]] = {
    "wanda": {"strategy": "wanda", "decision": "none"},
    "sparsegpt": {"strategy": "sparsegpt"},
    "sparsegpt + admm": {"strategy": "sparsegpt", **ADMM},
    "two probes": {},
    "two probes + obs": OBS,
    "two probes + least squares": {"reconstruction": "least_squares"},
    "two probes + admm": ADMM,
    "wanda + obs": {"strategy": "wanda", "decision": "none", **OBS},
    "wanda + admm": {"strategy": "wanda", "decision": "none", **ADMM},
    "one probe": {"decision": "none"},
    "one probe + obs": {"decision": "none", **OBS},
    "one probe + admm": {"decision": "none", **ADMM},
    "magnitude": {"strategy": "magnitude", "decision": "none", "scope": "row"},
    "magnitude + obs": {"strategy": "magnitude", "decision": "none", "scope": "row", **OBS},
    "random": {"strategy": "random", "decision": "none"},
    "random + obs": {"strategy": "random", "decision": "none", **OBS},
    RULE: THRESHOLD,
    RULE + " + obs": THRESHOLD | OBS,
    "rounds": {"rounds": (0.4, 0.7, 1.0)},
    "rounds + obs": {"rounds": (0.4, 0.7, 1.0), **OBS},
    "rounds + admm": {"rounds": (0.4, 0.7, 1.0), **ADMM},
    "sequential": {"order": "sequential"},
    "sequential + obs": {"order": "sequential", **OBS},
    "sequential + admm": {"order": "sequential", **ADMM},
}
IMPORTANT = (
    "wanda",
    "sparsegpt",
    "sparsegpt + admm",
    "one probe",
    "two probes",
    "two probes + obs",
    "two probes + admm",
    "one probe + admm",
)
EXTRA = (  # other reconstructions of masks whose OBS row is in the table
    "two probes + least squares",
    "wanda + admm",
    "rounds + admm",
    "sequential + admm",
)
ACCUMULATORS: dict[str, dict[str, Any]] = {
    "path, float32": {},
    "path, int8": {"accumulator_dtype": "int8"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "two probes": {},
    "sequence": {"fisher": "sequence"},
    "token": {"fisher": "token"},
    "factored": {"fisher": "factored"},
    "reduction_factor=0": {"reduction_factor": 0.0},
    "reduction_factor=0.5": {"reduction_factor": 0.5},
    "max_matrix_sparsity=0.9": {"max_matrix_sparsity": 0.9},
    "max_matrix_sparsity=0.8": {"max_matrix_sparsity": 0.8},
    "scope=block": {"scope": "block"},
    "scope=tensor": {"scope": "tensor"},
}
PEERS = {"llm-compressor, sparsegpt": "sparsegpt", "llm-compressor, wanda": "wanda"}
MAIN_COLUMNS = ("0.5", "0.6", "2:4")
COLUMNS = (*MAIN_COLUMNS, "0.7", "4:8")


def in_table(method: str, column: str) -> bool:
    """Whether the table has the cell. `--full` and `--methods` ask for others too."""
    if method in VARIANTS and method not in METHODS:
        return column == "0.6" or "matrix_sparsity" in method
    return method in IMPORTANT or (column in MAIN_COLUMNS and method not in EXTRA)


def configuration(
    options: dict[str, Any], column: str, ask: argparse.Namespace, seed: int, zeros: float
) -> GradProbeConfig | None:
    """The configuration of a cell; None where there is no such thing.

    Args:
        options: of the method.
        zeros: the share of zeros that the other cells of an unstructured column have.
    """
    options = {"reconstruction": "none", **options}
    if ":" in column:
        options.pop("scope", None)
        if "rounds" in options or options.get("decision") == "threshold":
            return None  # a pattern has one sparsity only
        options["pattern"] = column
    elif "rounds" in options:
        options["rounds"] = tuple(part * zeros for part in options["rounds"])
    else:
        options["sparsity"] = zeros
    if options.get("order") == "sequential":
        options["blocks_per_step"] = ask.blocks_per_step
    return GradProbeConfig(
        **options,
        num_samples=ask.num_samples,
        sequence_length=ask.sequence_length,
        batch_size=ask.batch_size,
        seed=seed,
    )
