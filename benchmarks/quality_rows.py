"""The rows and columns of `quality.py`: what each row does, and which cells a table has by default.

A label names the row in the result files and on the pages: changing one orphans its cells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.rivals import Masks, owl_masks
from gradprobe_hf import GradProbeConfig

Options = dict[str, Any]  # of a configuration, by name


@dataclass(frozen=True)
class Row:
    """One way to prune.

    Attributes:
        options: of the configuration.
        masks: what decides instead of the score and the rule of these options; the update is theirs.
        calibration: a text of its own; None: the table's.
        peer: what llm-compressor is asked for; then nothing else counts.
        like: the row whose sparsity it has, in place of the column's.
    """

    options: Options = field(default_factory=dict)
    masks: Masks | None = None
    calibration: str | None = None
    peer: str | None = None
    like: str | None = None

    def is_in(self, column: str) -> bool:
        """Whether there is such a cell: a pattern has one sparsity only, the same in every matrix."""
        uneven = self.masks is not None or "in budgets" in self.options.get("update", "")
        several = "rounds" in self.options or self.options.get("rule") == "threshold" or self.like is not None
        return ":" not in column or not (uneven or several)


ONE_PROBE: Options = {"probes": 1}
TWO_PROBES: Options = {"probes": 2}
WANDA: Options = {"score": "wanda"}
MAGNITUDE: Options = {"score": "magnitude", "scope": "row"}  # where it does better than over a matrix or the model
RANDOM: Options = {"score": "random"}
ROUNDS: Options = {**TWO_PROBES, "rounds": (0.4, 0.7, 1.0)}  # fractions of the column's sparsity
SEQUENTIAL: Options = {**TWO_PROBES, "order": "sequential"}
THRESHOLD: Options = {"score": "wanda", "probes": 2, "rule": "threshold", "gradient_threshold": 1.0}
SPARSEGPT: Options = {"update": "sparsegpt"}
OBS: Options = {"update": "obs", "dense_target": 0.5}  # its default when most tables were made, where it is 0.25 now
ADMM: Options = {"update": "admm"}
BLOCKS: Options = {"refinement": "blocks"}
RECOVERY: Options = {"recovery_steps": 100}  # of 8 windows each: 410,000 tokens at 512
LONGER: Options = {"recovery_steps": 488}  # 2 million
AS_PRUNED: Options = {"dense_target": 0.0}  # outputs of the model as pruned so far, as SparseGPT published it
HALF_WAY: Options = {"dense_target": 0.5}
A_QUARTER: Options = {"dense_target": 0.25}

RULE = "threshold rule"
AS_SPARSE = ", as sparse as the threshold rule"
AS_SPARSE_ROWS = {
    "wanda" + AS_SPARSE: Row(WANDA, like=RULE),
    "sparsegpt" + AS_SPARSE: Row(SPARSEGPT, like=RULE),
    "two probes" + AS_SPARSE: Row(TWO_PROBES, like=RULE),
}
RULE_ROWS = (RULE, RULE + " + obs", *AS_SPARSE_ROWS)  # at the sparsity the rule came to, not at their column's

PEERS = {
    "llm-compressor, sparsegpt": Row(peer="sparsegpt"),
    "llm-compressor, wanda": Row(peer="wanda"),
}
METHODS: dict[str, Row] = {
    "wanda": Row(WANDA),
    "wanda, block by block": Row({"update": "wanda by block"}),
    "wanda, owl": Row(WANDA, owl_masks),
    "gblm": Row({"score": "gblm", "probes": 1}),
    "sparsegpt": Row(SPARSEGPT),
    "sparsegpt, dense_target 0.25": Row(SPARSEGPT | A_QUARTER),
    "sparsegpt, dense_target 0.5": Row(SPARSEGPT | HALF_WAY),
    "sparsegpt, owl": Row(WANDA | {"update": "sparsegpt in budgets"}, owl_masks),
    "sparsegpt, budgets of one probe": Row(ONE_PROBE | {"update": "sparsegpt in budgets"}),
    "sparsegpt + least squares": Row({"update": "sparsegpt+least_squares"}),
    "sparsegpt + admm": Row({"update": "sparsegpt+admm"}),
    "sparsegpt + admm, dense_target 0": Row({"update": "sparsegpt+admm"} | AS_PRUNED),
    "sparsegpt + admm, dense_target 0.5": Row({"update": "sparsegpt+admm"} | HALF_WAY),
    "sparsegpt + admm, owl": Row(WANDA | {"update": "sparsegpt+admm in budgets"}, owl_masks),
    "sparsegpt + admm, budgets of one probe": Row(ONE_PROBE | {"update": "sparsegpt+admm in budgets"}),
    "two probes": Row(TWO_PROBES),
    "two probes + obs": Row(TWO_PROBES | OBS),
    "two probes + obs, dense_target 0": Row(TWO_PROBES | OBS | AS_PRUNED),
    "two probes + obs, dense_target 0.25": Row(TWO_PROBES | OBS | A_QUARTER),
    "two probes + least squares": Row(TWO_PROBES | {"update": "least_squares"}),
    "two probes + admm": Row(TWO_PROBES | ADMM),
    "wanda + obs": Row(WANDA | OBS),
    "wanda + obs, dense_target 0": Row(WANDA | OBS | AS_PRUNED),
    "wanda + obs, dense_target 0.25": Row(WANDA | OBS | A_QUARTER),
    "wanda + admm": Row(WANDA | ADMM),
    "one probe": Row(ONE_PROBE),
    "one probe + obs": Row(ONE_PROBE | OBS),
    "one probe + obs, dense_target 0": Row(ONE_PROBE | OBS | AS_PRUNED),
    "one probe + admm": Row(ONE_PROBE | ADMM),
    "one probe + admm, dense_target 0": Row(ONE_PROBE | ADMM | AS_PRUNED),
    "one probe + admm, dense_target 0.5": Row(ONE_PROBE | ADMM | HALF_WAY),
    "one probe + admm + blocks": Row(ONE_PROBE | ADMM | BLOCKS),
    "one probe + blocks": Row(ONE_PROBE | BLOCKS),
    "sparsegpt + blocks": Row(SPARSEGPT | BLOCKS),
    "sparsegpt + admm + blocks": Row({"update": "sparsegpt+admm"} | BLOCKS),
    "wanda + blocks": Row(WANDA | BLOCKS),
    "one probe + admm + recovery": Row(ONE_PROBE | ADMM | RECOVERY),
    "one probe + admm + blocks + recovery": Row(ONE_PROBE | ADMM | BLOCKS | RECOVERY),
    "one probe + admm + blocks + recovery, 488 steps": Row(ONE_PROBE | ADMM | BLOCKS | LONGER),
    "sparsegpt + recovery": Row(SPARSEGPT | RECOVERY),
    "sparsegpt + admm + recovery": Row({"update": "sparsegpt+admm"} | RECOVERY),
    "magnitude": Row(MAGNITUDE),
    "magnitude + obs": Row(MAGNITUDE | OBS),
    "random": Row(RANDOM),
    "random + obs": Row(RANDOM | OBS),
    RULE: Row(THRESHOLD),
    RULE + " + obs": Row(THRESHOLD | OBS),
    **AS_SPARSE_ROWS,  # behind the rule: they are made once it is known
    "rounds": Row(ROUNDS),
    "rounds + obs": Row(ROUNDS | OBS),
    "rounds + admm": Row(ROUNDS | ADMM),
    "sequential": Row(SEQUENTIAL),
    "sequential + obs": Row(SEQUENTIAL | OBS),
    "sequential + admm": Row(SEQUENTIAL | ADMM),
    **PEERS,
}
IMPORTANT = (  # rows that the further columns have too
    "wanda",
    "sparsegpt",
    "sparsegpt, dense_target 0.5",
    "sparsegpt, owl",
    "sparsegpt + admm",
    "sparsegpt + admm, owl",
    "one probe",
    "two probes",
    "two probes + obs",
    "two probes + obs, dense_target 0",
    "two probes + admm",
    "one probe + admm",
    "one probe + admm + blocks",
    "sparsegpt + blocks",
    "sparsegpt + admm + blocks",
    *PEERS,
)
EXTRA = (  # made when asked for
    "sparsegpt, dense_target 0.25",
    "sparsegpt + least squares",
    "sparsegpt + admm, dense_target 0",
    "sparsegpt + admm, dense_target 0.5",
    "two probes + obs, dense_target 0.25",
    "two probes + least squares",
    "wanda + obs, dense_target 0.25",
    "wanda + admm",
    "one probe + admm, dense_target 0",
    "one probe + admm, dense_target 0.5",
    "rounds + admm",
    "sequential + admm",
    "one probe + blocks",
    "wanda + blocks",
    "one probe + admm + recovery",
    "one probe + admm + blocks + recovery",
    "one probe + admm + blocks + recovery, 488 steps",
    "sparsegpt + recovery",
    "sparsegpt + admm + recovery",
)
ACCUMULATORS: dict[str, Row] = {
    "path, float32": Row(TWO_PROBES),
    "path, int8": Row(TWO_PROBES | {"accumulator_dtype": "int8"}),
}
VARIANTS: dict[str, Row] = {
    "two probes": Row(TWO_PROBES),
    "sequence": Row(TWO_PROBES | {"fisher": "sequence"}),
    "token": Row(TWO_PROBES | {"fisher": "token"}),
    "factored": Row(TWO_PROBES | {"fisher": "factored"}),
    "reduction_factor=0": Row(TWO_PROBES | {"reduction_factor": 0.0}),
    "reduction_factor=0.5": Row(TWO_PROBES | {"reduction_factor": 0.5}),
    "max_matrix_sparsity=0.9": Row(TWO_PROBES | {"max_matrix_sparsity": 0.9}),
    "max_matrix_sparsity=0.8": Row(TWO_PROBES | {"max_matrix_sparsity": 0.8}),
    "scope=block": Row(TWO_PROBES | {"scope": "block"}),
    "scope=tensor": Row(TWO_PROBES | {"scope": "tensor"}),
}
TEXTS: dict[str, Row] = {
    "16 windows": Row(TWO_PROBES | {"num_samples": 16}),
    "64 windows": Row(TWO_PROBES | {"num_samples": 64}),
    "128 windows": Row(TWO_PROBES | {"num_samples": 128}),
    "64 windows of the model's own text": Row(TWO_PROBES | {"num_samples": 64}, calibration="self"),
}
MAIN_COLUMNS = ("0.5", "0.6", "2:4")
COLUMNS = (*MAIN_COLUMNS, "0.7", "4:8", "0.8")

# The tables of `quality.py`: their rows, and their columns by default.
TABLES: dict[str, tuple[dict[str, Row], tuple[str, ...]]] = {
    "quality": (METHODS, COLUMNS),
    "accumulators": (ACCUMULATORS, ("0.6",)),
    "variants": (VARIANTS, ("0.6", "0.7")),
    "texts": (TEXTS, ("0.5", "0.6")),
}


def in_table(method: str, column: str) -> bool:
    """Whether a table has the cell by default. `--full` and `--methods` ask for others too."""
    if method in METHODS:
        return method in IMPORTANT or (column in MAIN_COLUMNS and method not in EXTRA)
    return method not in VARIANTS or column == "0.6" or "matrix_sparsity" in method


def configuration(row: Row, column: str, sparsity: float, common: Options, blocks_per_step: int) -> GradProbeConfig:
    """The configuration of a cell that there is.

    Args:
        sparsity: what the cells of an unstructured column have.
        common: options of all rows; the row's own win.
        blocks_per_step: of a sequential order.
    """
    options = dict(row.options)
    if ":" in column:
        options.pop("scope", None)
        options["pattern"] = column
    elif "rounds" in options:
        options["rounds"] = tuple(part * sparsity for part in options["rounds"])
    else:
        options["sparsity"] = sparsity
    if options.get("order") == "sequential":
        options["blocks_per_step"] = blocks_per_step
    return GradProbeConfig(**{**common, **options})
