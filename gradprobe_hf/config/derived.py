"""Derived: what the options of a pruning run come to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from gradprobe_hf.config.fields import PruningOptions
from gradprobe_hf.data.text.text_options import DEFAULT_LENGTH
from gradprobe_hf.decisions.needs import Needs, needs_of, uses_fisher
from gradprobe_hf.decisions.table import DECISIONS, Decision
from gradprobe_hf.scores.budget import Budget, Scope
from gradprobe_hf.scores.table import SCORES, Score
from gradprobe_hf.scores.terms import GATES
from gradprobe_hf.structures.budgets import BUDGETS, ShapeBudget
from gradprobe_hf.structures.table import AUTO, STRUCTURES
from gradprobe_hf.structures.unit_scores import UNIT_SCORES, UnitScore
from gradprobe_hf.updates.refinement import REFINEMENTS, Refinement
from gradprobe_hf.updates.table import UPDATES, WeightUpdate

LARGEST_GROUP = 256
LEAST_DAMPING = 0.01


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(PruningOptions):
    """The rows of the tables that the options name, and what follows from several of them."""

    @property
    def score_row(self) -> Score | None:
        """None where the weight update chooses the mask."""
        return None if self.score is None else SCORES[self.score]

    @property
    def decision_row(self) -> Decision:
        return next(row for row in DECISIONS.values() if self.probes in row.probes and self.rule == row.rule)

    @property
    def update_row(self) -> WeightUpdate:
        return UPDATES[self.update or "none"]

    @property
    def updates(self) -> bool:
        """Whether a weight update changes kept weights."""
        return self.update_row.function is not None

    @property
    def refinement_row(self) -> Refinement:
        return REFINEMENTS[self.refinement]

    @property
    def refines(self) -> bool:
        """Whether blocks are trained."""
        return self.refinement_row.epochs > 0

    @property
    def reconstructs(self) -> bool:
        """Whether kept weights change, block by block."""
        return self.updates or self.refines

    @property
    def uses_fisher(self) -> bool:
        """Whether the probes estimate the Fisher information."""
        return uses_fisher(self.score_row, self.decision_row)

    @property
    def needs(self) -> Needs:
        """What has to be measured."""
        if self.structure is not None:
            # Whether "auto" will take experts is known once the model is there.
            probes = self.drops_experts or self.weighs_gates
            return Needs(frozenset({GATES}), "probe") if probes else Needs(frozenset(), "forward")
        return needs_of(self.score_row, self.decision_row, self.fisher, changes_weights=self.reconstructs)

    @property
    def shape_budget(self) -> ShapeBudget | None:
        """How large the model may be that is left, where its shape is not given."""
        return ShapeBudget.of(**{name: getattr(self, name) for name in BUDGETS}) if self.structure == AUTO else None

    @property
    def fixed_damping(self) -> float:
        """The damping of whatever does not choose its own."""
        return LEAST_DAMPING if isinstance(self.damping, str) else self.damping

    @property
    def holds_out(self) -> bool:
        """Whether the damping is chosen on rows that are held out from the others."""
        return self.damping == AUTO

    @property
    def structures(self) -> tuple[str, ...]:
        """The structures that go, or may."""
        return tuple(STRUCTURES if self.structure == AUTO else self.structure or ())

    @property
    def amounts(self) -> Mapping[str, int | float]:
        """Structure -> how much of it goes; of `"auto"`, where that is decided by a run, none is known."""
        return self.structure if isinstance(self.structure, Mapping) else {}

    @property
    def weighs_units(self) -> bool:
        """Whether units inside of blocks go."""
        return bool(self.unit_scores)

    @property
    def unit_scores(self) -> Mapping[str, UnitScore]:
        """Structure -> what tells which of its units go."""
        defaults = {name: STRUCTURES[name].importance for name in self.structures}
        return {name: UNIT_SCORES[self.importance or default] for name, default in defaults.items() if default}

    @property
    def weighs_inputs(self) -> bool:
        """Whether units go by what the inputs of their matrices say, which takes a walk from block to block."""
        return any("inputs" in score.measured for score in self.unit_scores.values())

    @property
    def weighs_gates(self) -> bool:
        """Whether units go by what a probe says of their gates."""
        return any("gradients" in score.measured for score in self.unit_scores.values())

    @property
    def in_rounds(self) -> tuple[str, ...]:
        """The structures that can go in portions: those that gates are measured of."""
        scores = self.unit_scores
        return tuple(
            name
            for name in self.structures
            if STRUCTURES[name].takes == "experts" or (name in scores and scores[name].takes_rounds)
        )

    @property
    def gate_probes(self) -> int:
        """Probes of gates, of experts and of units, where all of these are there and go."""
        units = {name for name in self.in_rounds if name in self.unit_scores}
        experts = set(self.in_rounds) - units
        at_once = int(self.weighs_gates and not units)
        return at_once + sum(self._rounds_of(names) for names in (units, experts) if names)

    def _rounds_of(self, names: Set[str]) -> int:
        """No more than units that go, as far as their number is known."""
        amounts = [self.amounts.get(name) for name in names]
        counts = [amount for amount in amounts if isinstance(amount, int)]
        return min(self.structure_rounds, max(counts)) if len(counts) == len(amounts) else self.structure_rounds

    @property
    def drops_experts(self) -> bool:
        """Whether experts go, or may, by a probe of their gates."""
        return any(STRUCTURES[name].takes == "experts" for name in self.structures)

    @property
    def drops_blocks(self) -> bool:
        """Whether whole blocks go, by the loss without each of them."""
        return any(STRUCTURES[name].takes == "blocks" for name in self.structures)

    @property
    def final_sparsity(self) -> float:
        assert self.sparsity is not None, "resolved when the configuration was made"
        return self.sparsity

    @property
    def window_length(self) -> int:
        """Tokens in a window, of a model that has as many positions."""
        return DEFAULT_LENGTH if self.sequence_length is None else self.sequence_length

    @property
    def first_level(self) -> float:
        """The sparsity of the first attempt with `max_metric_drop`."""
        return min(self.sparsity_step, self.final_sparsity) if self.initial_sparsity is None else self.initial_sparsity

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the most that may go of a matrix; None: anything."""
        if self.min_matrix_sparsity is None and self.max_matrix_sparsity is None:
            return None
        return self.min_matrix_sparsity or 0.0, 1.0 if self.max_matrix_sparsity is None else self.max_matrix_sparsity

    @property
    def group(self) -> tuple[int, int] | None:
        """(n kept, m inputs) of an n:m pattern, None when unstructured."""
        if self.pattern == "unstructured":
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.pattern) if isinstance(self.pattern, str) else None
        if found is None or not 0 < int(found[1]) < int(found[2]) <= LARGEST_GROUP:
            raise ValueError(
                f"pattern must be 'unstructured' or 'n:m' with 0 < n < m <= {LARGEST_GROUP}, like '2:4' (keeps 2 of "
                f"every 4 inputs), got {self.pattern!r}."
            )
        return int(found[1]), int(found[2])

    @property
    def candidate_scope(self) -> Scope:
        """The scope in which the score proposes candidates."""
        if self.structure is not None:
            return "block"  # the same of every block, by the comparison of its units
        default = self.update_row.scope if self.score_row is None else self.score_row.scope
        assert default is not None, "an update that chooses the mask says over what"
        return self.scope or default

    @property
    def budget_scope(self) -> Scope:
        """The scope in which the final budget is spent."""
        return self.scope or self.decision_row.scope or self.candidate_scope

    def budget_of(self, sparsity: float) -> Budget:
        """What the decision spends at a sparsity."""
        return Budget(sparsity, self.budget_scope, self.group, self.bounds)
