"""The rows and columns of `quality.py`: the configuration of each row, and which cells a table has by default.

A label names the row in the result files and on the pages: changing one orphans its cells.
"""

from __future__ import annotations

import argparse
from typing import Any

from gradprobe_hf import GradProbeConfig

Options = dict[str, Any]  # of a configuration, by name

ONE_PROBE: Options = {"probes": 1}
TWO_PROBES: Options = {"probes": 2}
WANDA: Options = {"score": "wanda"}
MAGNITUDE: Options = {"score": "magnitude", "scope": "row"}  # where it does better than over a matrix or the model
RANDOM: Options = {"score": "random"}
ROUNDS: Options = {**TWO_PROBES, "rounds": (0.4, 0.7, 1.0)}  # fractions of the column's sparsity
SEQUENTIAL: Options = {**TWO_PROBES, "order": "sequential"}
THRESHOLD: Options = {"score": "wanda", "probes": 2, "rule": "threshold", "gradient_threshold": 1.0}
OBS: Options = {"update": "obs"}
ADMM: Options = {"update": "admm"}

AND = " + "  # a mask and a weight update: rows that differ in the update alone share their masks
RULE = "threshold rule"
AS_SPARSE = ", as sparse as the threshold rule"
AS_SPARSE_ROWS = {method + AS_SPARSE: method for method in ("wanda", "sparsegpt", "two probes")}
RULE_ROWS = (RULE, RULE + " + obs", *AS_SPARSE_ROWS)  # at the sparsity the rule came to, not at their column's

# Wanda is first: it rounds its budget in every row, so that the others are asked for exactly the zeros it made.
METHODS: dict[str, Options] = {
    "wanda": WANDA,
    "sparsegpt": {"update": "sparsegpt"},
    "sparsegpt + admm": {"update": "sparsegpt+admm"},
    "two probes": TWO_PROBES,
    "two probes + obs": TWO_PROBES | OBS,
    "two probes + least squares": TWO_PROBES | {"update": "least_squares"},
    "two probes + admm": TWO_PROBES | ADMM,
    "wanda + obs": WANDA | OBS,
    "wanda + admm": WANDA | ADMM,
    "one probe": ONE_PROBE,
    "one probe + obs": ONE_PROBE | OBS,
    "one probe + admm": ONE_PROBE | ADMM,
    "magnitude": MAGNITUDE,
    "magnitude + obs": MAGNITUDE | OBS,
    "random": RANDOM,
    "random + obs": RANDOM | OBS,
    RULE: THRESHOLD,
    RULE + " + obs": THRESHOLD | OBS,
    "rounds": ROUNDS,
    "rounds + obs": ROUNDS | OBS,
    "rounds + admm": ROUNDS | ADMM,
    "sequential": SEQUENTIAL,
    "sequential + obs": SEQUENTIAL | OBS,
    "sequential + admm": SEQUENTIAL | ADMM,
}
IMPORTANT = (  # rows that the further columns have too
    "wanda",
    "sparsegpt",
    "sparsegpt + admm",
    "one probe",
    "two probes",
    "two probes + obs",
    "two probes + admm",
    "one probe + admm",
)
EXTRA = (  # further weight updates under masks whose OBS row is in the table: made when asked for
    "two probes + least squares",
    "wanda + admm",
    "rounds + admm",
    "sequential + admm",
)
ACCUMULATORS: dict[str, Options] = {
    "path, float32": TWO_PROBES,
    "path, int8": TWO_PROBES | {"accumulator_dtype": "int8"},
}
VARIANTS: dict[str, Options] = {
    "two probes": TWO_PROBES,
    "sequence": TWO_PROBES | {"fisher": "sequence"},
    "token": TWO_PROBES | {"fisher": "token"},
    "factored": TWO_PROBES | {"fisher": "factored"},
    "reduction_factor=0": TWO_PROBES | {"reduction_factor": 0.0},
    "reduction_factor=0.5": TWO_PROBES | {"reduction_factor": 0.5},
    "max_matrix_sparsity=0.9": TWO_PROBES | {"max_matrix_sparsity": 0.9},
    "max_matrix_sparsity=0.8": TWO_PROBES | {"max_matrix_sparsity": 0.8},
    "scope=block": TWO_PROBES | {"scope": "block"},
    "scope=tensor": TWO_PROBES | {"scope": "tensor"},
}
# Two probes on other calibration text; `calibration` is no option of the configuration, but the text itself.
TEXTS: dict[str, Options] = {
    "16 windows": TWO_PROBES | {"num_samples": 16},
    "64 windows": TWO_PROBES | {"num_samples": 64},
    "128 windows": TWO_PROBES | {"num_samples": 128},
    "64 windows of the model's own text": TWO_PROBES | {"num_samples": 64, "calibration": "self"},
}
PEERS = {"llm-compressor, sparsegpt": "sparsegpt", "llm-compressor, wanda": "wanda"}
MAIN_COLUMNS = ("0.5", "0.6", "2:4")
COLUMNS = (*MAIN_COLUMNS, "0.7", "4:8")

# The tables of `quality.py`: their rows, and their columns by default.
TABLES: dict[str, tuple[dict[str, Options], tuple[str, ...]]] = {
    "quality": (METHODS, COLUMNS),
    "accumulators": (ACCUMULATORS, ("0.6",)),
    "variants": (VARIANTS, ("0.6", "0.7")),
    "texts": (TEXTS, ("0.5", "0.6")),
}


def in_table(method: str, column: str) -> bool:
    """Whether a table has the cell by default. `--full` and `--methods` ask for others too."""
    if method in METHODS or method in PEERS:
        return method in IMPORTANT or (column in MAIN_COLUMNS and method not in EXTRA)
    return method not in VARIANTS or column == "0.6" or "matrix_sparsity" in method


def configuration(
    options: Options, column: str, args: argparse.Namespace, seed: int, sparsity: float
) -> GradProbeConfig | None:
    """The configuration of a cell; None where the method has none in this column.

    Args:
        options: of the method.
        sparsity: what the other cells of an unstructured column have.
    """
    options = {name: value for name, value in options.items() if name != "calibration"}
    if ":" in column:
        options.pop("scope", None)
        if "rounds" in options or options.get("rule") == "threshold":
            return None  # a pattern has one sparsity only
        options["pattern"] = column
    elif "rounds" in options:
        options["rounds"] = tuple(part * sparsity for part in options["rounds"])
    else:
        options["sparsity"] = sparsity
    if options.get("order") == "sequential":
        options["blocks_per_step"] = args.blocks_per_step
    common = {"num_samples": args.num_samples, "sequence_length": args.sequence_length, "batch_size": args.batch_size}
    return GradProbeConfig(**{**common, "seed": seed, **options})
