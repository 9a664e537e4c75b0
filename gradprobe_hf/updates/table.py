"""The table of weight updates: what the kept weights become. To add one: a function in a file of its own, and a row.

All work on one matrix at a time, block by block, on the activations of the model as pruned so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from gradprobe_hf.scores.budget import Scope
from gradprobe_hf.updates.admm import ROUNDS, solve_admm
from gradprobe_hf.updates.admm import STEPS as ADMM_STEPS
from gradprobe_hf.updates.least_squares import STEPS, solve_least_squares
from gradprobe_hf.updates.problem import MatrixProblem, Solution
from gradprobe_hf.updates.sweep import FACTORED, solve_obs, solve_sparsegpt

Solve = Callable[[MatrixProblem, Tensor | None], Solution]


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """One way to change kept weights.

    Attributes:
        function: a matrix and its mask -> its new values and mask; None: kept weights stay as they are.
        chooses_mask: whether it is given no mask and chooses one: then no score and no probe take part.
        scope: over what the budget of a mask that it chooses is spent.
        dense_target: the default of that option: see `MatrixProblem`.
        weighs_rows: whether it reads the Fisher information of rows, where a probe has measured it.
        products: of `[out, in] x [in, in]`, beside the factorisation of H and a sweep; for `estimate`.
        workspace: temporaries `[out, in]` in float32 that are alive at once: a measured peak, for `estimate`.
        hessians: temporaries `[in, in]` beside these, likewise.
        sentence: what became of the kept weights, for the model card; of an update that chooses the mask the whole
            method, with `{unit}` for what the budget is spent over.
        chooses_damping: whether it can tell by rows that are held out how much of it serves.
        refuses: option -> why it cannot be combined with this update.
        source: paper and section.
    """

    function: Solve | None
    chooses_mask: bool = False
    scope: Scope | None = None
    dense_target: float = 0.0
    weighs_rows: bool = False
    products: int = 0
    workspace: int = 0
    hessians: int = FACTORED
    chooses_damping: bool = False
    sentence: str
    refuses: Mapping[str, str] = field(default_factory=dict)
    source: str


def _after_sparsegpt(then: Solve, problem: MatrixProblem, mask: Tensor | None) -> Solution:
    """SparseGPT's mask, and another update under it."""
    chosen = solve_sparsegpt(problem, mask)
    solved = then(problem, chosen.mask)
    return Solution(solved.values, solved.mask, chosen.damping)


_LEAST_SQUARES = (
    "Then the kept weights were changed, block by block, to those that keep each matrix's outputs on the calibration "
    "inputs best (least squares under this mask)."
)
_ADMM = (
    "Then, block by block, it was chosen again which weights of each matrix go, as many as before, so that the others "
    "can keep its outputs on the calibration inputs best (ADMM), and these were changed to do so (conjugate gradients)."
)
_SPARSEGPT = (
    "SparseGPT: block by block on the activations of the model as pruned so far, the weights whose removal costs least "
    "were set to zero, and the kept weights behind them changed to keep each matrix's outputs on the calibration "
    "inputs, with one exact budget over {unit}."
)
_CHOOSES = "it chooses the mask itself"
_OWN_MASK: dict[str, str] = {
    "score": _CHOOSES,
    "probes": _CHOOSES,
    "rule": _CHOOSES,
    "min_matrix_sparsity": "it prunes every matrix alike",
    "max_matrix_sparsity": "it prunes every matrix alike",
    "rounds": "it decides once, at one sparsity",
    "max_metric_drop": "it decides once, at one sparsity",
    "structure": _CHOOSES,
}

UPDATES: dict[str, WeightUpdate] = {
    "none": WeightUpdate(function=None, sentence="No other weight was changed.", source=""),
    "obs": WeightUpdate(
        function=solve_obs,
        dense_target=0.25,
        sentence="Then the kept weights were changed, block by block, to keep each matrix's outputs on the calibration "
        "inputs (SparseGPT's sweep under this mask).",
        source="Frantar and Alistarh 2023 (arXiv:2301.00774), sections 3.2 to 3.4",
    ),
    "least_squares": WeightUpdate(
        chooses_damping=True,
        function=solve_least_squares,
        dense_target=0.25,
        products=STEPS,
        workspace=7,
        hessians=2,
        sentence=_LEAST_SQUARES,
        source="Meng et al. 2024, ALPS (arXiv:2406.07831)",
    ),
    "admm": WeightUpdate(
        function=solve_admm,
        dense_target=0.25,
        weighs_rows=True,
        products=ADMM_STEPS + ROUNDS,
        workspace=7,
        hessians=2,
        sentence=_ADMM,
        refuses={"structure": "it would choose other weights than the structures that go"},
        source="Boža 2024 (arXiv:2401.02938); Meng et al. 2024, ALPS (arXiv:2406.07831)",
    ),
    "sparsegpt": WeightUpdate(
        function=solve_sparsegpt,
        chooses_mask=True,
        scope="tensor",
        sentence=_SPARSEGPT,
        refuses=_OWN_MASK,
        source="Frantar and Alistarh 2023 (arXiv:2301.00774)",
    ),
    "sparsegpt+least_squares": WeightUpdate(
        function=partial(_after_sparsegpt, solve_least_squares),
        chooses_mask=True,
        scope="tensor",
        dense_target=0.25,
        products=STEPS,
        workspace=7,
        sentence=f"{_SPARSEGPT} {_LEAST_SQUARES}",
        refuses=_OWN_MASK,
        source="Frantar and Alistarh 2023 (arXiv:2301.00774), then as `least_squares`",
    ),
    "sparsegpt+admm": WeightUpdate(
        function=partial(_after_sparsegpt, solve_admm),
        chooses_mask=True,
        scope="tensor",
        dense_target=0.25,
        products=ADMM_STEPS + ROUNDS,
        workspace=7,
        sentence=f"{_SPARSEGPT} {_ADMM}",
        refuses=_OWN_MASK,
        source="Frantar and Alistarh 2023 (arXiv:2301.00774), then as `admm`",
    ),
}
