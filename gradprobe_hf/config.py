"""GradProbeConfig: everything that decides the result, validated when it is made.

What is *not* here: where the model and the text come from. Those are arguments of `prune_pretrained`, so that one
configuration can be reused on another model.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from huggingface_hub import hf_hub_download

from gradprobe_hf.runtime.yaml_options import read_yaml

Strategy = Literal["fisher", "wanda", "magnitude", "random", "sparsegpt"]
Decision = Literal["path", "threshold", "none"]
Scope = Literal["global", "block", "tensor", "row"]
Order = Literal["joint", "sequential"]
BlockOrder = Literal["forward", "reverse", "size"]
Reconstruction = Literal["none", "obs", "least_squares", "admm"]
Preset = Literal["fast", "balanced", "best"]
GradientThreshold = float | Mapping[str, float] | Literal["adaptive"]
Fisher = Literal["blend", "sequence", "token", "factored"]
AccumulatorDtype = Literal["float32", "bfloat16", "int8"]
AccumulatorDevice = Literal["same", "cpu", "disk"]

CONFIG_NAME = "gradprobe_config.json"
LARGEST_GROUP = 256

# The scope in which each strategy is published: Wanda compares within a row, magnitude within a layer.
STRATEGY_SCOPE: dict[Strategy, Scope] = {
    "fisher": "global",
    "wanda": "row",
    "magnitude": "tensor",
    "random": "tensor",
    "sparsegpt": "tensor",
}
# Three points on the frontier of time and quality, as benchmarks/quality.py found it; see docs/method.md.
PRESETS: dict[Preset, dict[str, Any]] = {
    "fast": {"decision": "none"},
    "balanced": {"decision": "path"},
    "best": {"decision": "none", "reconstruction": "admm"},  # admm decides again what a second probe would
}
# Inside small groups there is no budget to spend elsewhere, and what the kept weights can make up for counts for more
# than which of them go.
PRESETS_IN_GROUPS: dict[Preset, dict[str, Any]] = {
    "fast": {"strategy": "sparsegpt"},
    "balanced": {"strategy": "sparsegpt", "reconstruction": "admm"},
    "best": {"decision": "none", "reconstruction": "admm"},
}
DEFAULT_IN_GROUPS: Preset = "best"  # a mask by itself is far behind there, and takes as long


@dataclass(frozen=True, kw_only=True)
class GradProbeConfig:
    """How to prune.

    Args:
        sparsity: fraction of the target weights to remove, in [0, 1). Default 0.5, or what `pattern` implies.
        pattern: `"unstructured"`, or `"n:m"`: of every m consecutive inputs of a row keep at most n
            (`"2:4"` keeps 2 of 4, as NVIDIA counts).
        preset: `"fast"` (one probe decides), `"balanced"` (two, the default) or `"best"` (one, and
            `reconstruction="admm"`). For an n:m pattern: SparseGPT; SparseGPT and `"admm"`; or one probe and `"admm"`
            (the default there, unless a strategy, decision or reconstruction is given). What a preset comes to is
            settled when a configuration is made, and options that are given win over it.
        strategy: which score proposes the candidates: `"fisher"` (default), `"wanda"`, `"magnitude"` or `"random"`. Or
            `"sparsegpt"`, which proposes none: it chooses while it reconstructs.
        decision: `"path"` scores every weight by both probes and meets the budget exactly; `"threshold"` is the
            published GradProbe rule on the candidates, whose sparsity is what comes out, at most the budget;
            `"none"` prunes the candidates (default with `strategy="sparsegpt"`; else `"path"`).
        scope: over what one budget is spent: `"global"`, `"block"`, `"tensor"` or `"row"`. Default: global for the
            path decision, and for candidates the scope the strategy was published with (Wanda: row, magnitude and
            random: tensor).
        fisher: which estimate of the squared gradient: `"blend"` (sequence x factored), `"sequence"`, `"token"`,
            `"factored"`.
        min_matrix_sparsity: the least fraction of any matrix that goes, where one budget is spent over several.
        max_matrix_sparsity: the most, so that no matrix is emptied.
        gradient_threshold: relative growth of a gradient that the threshold decision tolerates, >= 0; or one for each
            pattern of matrices, `{"*.mlp.*": 0.5, "*": 0.1}`, the first that matches; or `"adaptive"`, by size:
            `sqrt(weights / mean weights of a matrix)`.
        order: `"joint"`: all matrices shrink together, two probes whatever the depth. `"sequential"`: one step of
            blocks after the other, each probed on the model as pruned so far, and with its share of the budget.
        block_order: of a sequential order: `"forward"` from the first block, `"reverse"` from the last, or `"size"`,
            the largest first.
        blocks_per_step: how many blocks a sequential step decides together.
        rounds: sparsities of several rounds, the last of which is `sparsity`: each probes the model as the one before
            would prune it, and decides anew about every weight.
        max_metric_drop: prune as far as the metric of the evaluation allows, at most to `sparsity`: perplexity up by
            this much, absolute (`1.5`) or relative (`"5%"`).
        initial_sparsity: of the first trial on that way, at most `sparsity`; default: `sparsity_step`.
        sparsity_step: between two trials on that way, before bisection.
        reduction_factor: what the second probe multiplies candidates by, in [0, 1).
        spike_limit: how many times its energy of the first probe the gradient of one sequence may have at one matrix in
            the second, >= 0, before it is scaled down to that (path decision); 0: no limit.
        reconstruction: how kept weights are changed, block by block, so that each matrix's outputs on the calibration
            inputs stay what they were. `"obs"`: SparseGPT's sweep under the mask that was decided. `"least_squares"`:
            the best there are under it. `"admm"`: these, after choosing again which weights go, as many of each matrix
            (row, group) as were decided. `"none"`: not at all (default, unless the preset has another).
        dense_target: which outputs those are, from 0, of the matrix as it is on the inputs of the model as pruned so
            far, to 1, of the dense model. Default 0.25; with `"obs"` 0.5; of `strategy="sparsegpt"` alone 0, as
            published.
        damping: added to the diagonal of a Hessian before it is inverted, as a fraction of its mean, > 0.
        num_samples: calibration windows, or rows of an already tokenised dataset.
        sequence_length: tokens in a window.
        batch_size: windows in one forward pass: memory and speed, never the result. `"auto"`: the largest that fits.
        checkpointing: recompute each block in backward instead of keeping its activations. `"auto"`: where they would
            not fit in memory.
        accumulator_dtype: what statistics `[out, in]` are kept in, in bytes per weight and term: `"float32"` 4,
            `"bfloat16"` 2, `"int8"` (block-scaled, logarithmic) 1.03; both of the small ones are rounded
            stochastically.
        accumulator_device: where: on the weight's device (`"same"`), in the memory of the host (`"cpu"`), or in
            files (`"disk"`).
        include: patterns of modules to prune: an exact name, the end of one (`"q_proj"`), a glob, or `"re:..."`.
            When given, only what they match is pruned, embeddings and output head included if matched.
        exclude: patterns of modules to leave alone.
        evaluation_samples: windows to measure perplexity on.
        seed: draws the calibration windows, the random strategy and the model's own text.
    """

    sparsity: float | None = None
    pattern: str = "unstructured"
    preset: Preset | None = None
    strategy: Strategy | None = None
    decision: Decision | None = None
    scope: Scope | None = None
    fisher: Fisher = "blend"
    min_matrix_sparsity: float | None = None
    max_matrix_sparsity: float | None = None
    gradient_threshold: GradientThreshold = 0.0
    reduction_factor: float = 0.1
    spike_limit: float = 2.0
    order: Order = "joint"
    block_order: BlockOrder = "forward"
    blocks_per_step: int = 1
    rounds: Sequence[float] = ()
    max_metric_drop: float | str | None = None
    initial_sparsity: float | None = None
    sparsity_step: float = 0.1
    reconstruction: Reconstruction | None = None
    dense_target: float | None = None
    damping: float = 0.01
    num_samples: int = 128
    sequence_length: int = 512
    batch_size: int | Literal["auto"] = 4
    checkpointing: bool | Literal["auto"] = "auto"
    accumulator_dtype: AccumulatorDtype = "float32"
    accumulator_device: AccumulatorDevice = "same"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    evaluation_samples: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        self._take(self._preset_values())
        self._take({"strategy": "fisher", "reconstruction": "none"})
        _one_of("strategy", self.strategy, get_args(Strategy))
        if self.decision is None:
            object.__setattr__(self, "decision", "none" if self.strategy == "sparsegpt" else "path")
        _one_of("decision", self.decision, get_args(Decision))
        _one_of("reconstruction", self.reconstruction, get_args(Reconstruction))
        _one_of("fisher", self.fisher, get_args(Fisher))
        if self.scope is not None:
            _one_of("scope", self.scope, get_args(Scope))
        _one_of("accumulator_dtype", self.accumulator_dtype, get_args(AccumulatorDtype))
        _one_of("accumulator_device", self.accumulator_device, get_args(AccumulatorDevice))
        if self.checkpointing != "auto" and not isinstance(self.checkpointing, bool):
            raise ValueError(f"checkpointing must be True, False or 'auto', got {self.checkpointing!r}.")
        for name in ("num_samples", "evaluation_samples"):
            _whole(name, getattr(self, name), at_least=1)
        if self.batch_size != "auto":
            _whole("batch_size", self.batch_size, at_least=1, other="'auto', or ")
        _whole("sequence_length", self.sequence_length, at_least=2)
        _whole("seed", self.seed, at_least=0)
        _one_of("order", self.order, get_args(Order))
        _one_of("block_order", self.block_order, get_args(BlockOrder))
        _whole("blocks_per_step", self.blocks_per_step, at_least=1)
        object.__setattr__(self, "gradient_threshold", _threshold(self.gradient_threshold))
        object.__setattr__(self, "rounds", _rounds(self.rounds))
        _number("reduction_factor", self.reduction_factor, "a fraction in [0, 1)", lambda x: 0 <= x < 1)
        _number("spike_limit", self.spike_limit, "a factor >= 0 (0: no limit)", lambda x: x >= 0)
        if self.dense_target is None and self.reconstructs:
            object.__setattr__(self, "dense_target", self._best_dense_target())
        if self.dense_target is not None:
            _number("dense_target", self.dense_target, "a fraction in [0, 1]", lambda x: 0 <= x <= 1)
        _number("damping", self.damping, "a number > 0", lambda x: x > 0)
        for name in ("include", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        object.__setattr__(self, "sparsity", self._resolved_sparsity())
        if self.group is not None and self.scope is not None:
            raise ValueError(
                f"scope={self.scope!r} cannot hold with pattern={self.pattern!r}, which spends its budget in every "
                "group of inputs; leave scope unset."
            )
        self._check_sparsegpt()
        self._check_bounds()
        self._check_schedule()
        if self.group is not None and self.decision == "threshold":
            raise ValueError(
                f"decision='threshold' gives candidates back: pattern={self.pattern!r} would not hold; use 'path'."
            )

    def _preset_values(self) -> dict[str, Any]:
        """What the preset comes to beside the options that are given."""
        if self.preset is not None:
            _one_of("preset", self.preset, get_args(Preset))
        in_groups = PRESETS_IN_GROUPS[self.preset or DEFAULT_IN_GROUPS]
        is_free = self.decision is None and self.strategy in (None, in_groups.get("strategy"))
        if self.group is not None and is_free and (self.preset is not None or self.reconstruction is None):
            return in_groups
        values = {} if self.preset is None else dict(PRESETS[self.preset])
        if self.strategy == "sparsegpt":
            values.pop("decision", None)  # it is one of its own
        return values

    def _take(self, values: Mapping[str, Any]) -> None:
        """What is not given, from here."""
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def reconstructs(self) -> bool:
        """Whether kept weights change."""
        return self.strategy == "sparsegpt" or self.reconstruction != "none"

    @property
    def solves_least_squares(self) -> bool:
        """Whether they are the best that there are under the mask."""
        return self.reconstruction in ("least_squares", "admm")

    def _best_dense_target(self) -> float:
        if self.solves_least_squares:
            return 0.25
        return 0.0 if self.strategy == "sparsegpt" else 0.5

    def _check_sparsegpt(self) -> None:
        if self.strategy != "sparsegpt":
            return
        if self.decision != "none":
            raise ValueError(
                f"strategy='sparsegpt' chooses and updates in one sweep, and proposes no candidates to "
                f"decision={self.decision!r}; leave decision unset, or decide and then use reconstruction='obs'."
            )
        if self.scope not in (None, "tensor"):
            raise ValueError(f"strategy='sparsegpt' spends its budget in each matrix, not over scope={self.scope!r}.")

    def _check_bounds(self) -> None:
        if self.bounds is None:
            return
        for name in ("min_matrix_sparsity", "max_matrix_sparsity"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), "a fraction in [0, 1]", lambda x: 0 <= x <= 1)
        low, high = self.bounds
        wanted = f"0 <= min_matrix_sparsity <= sparsity ({self.final_sparsity:g}) <= max_matrix_sparsity <= 1"
        if not 0 <= low <= min(self.rounds or (self.final_sparsity,)) <= self.final_sparsity <= high <= 1:
            raise ValueError(f"a budget between the bounds needs {wanted}, got {low:g} and {high:g}.")
        if self.group is not None or self.decision_scope not in ("global", "block"):
            spent = f"pattern={self.pattern!r}" if self.group else f"scope={self.decision_scope!r}"
            raise ValueError(f"{spent} prunes every matrix alike: bounds on matrices are for 'global' and 'block'.")
        if self.decision == "threshold":
            raise ValueError("decision='threshold' gives candidates back: bounds on matrices would not hold.")

    def _check_schedule(self) -> None:
        _number("sparsity_step", self.sparsity_step, "a fraction in (0, 1)", lambda x: 0 < x < 1)
        if self.initial_sparsity is not None:
            if self.max_metric_drop is None:
                raise ValueError("initial_sparsity is where a search with max_metric_drop begins: set that too.")
            most = self.final_sparsity
            _number("initial_sparsity", self.initial_sparsity, f"a fraction in [0, {most:g}]", lambda x: 0 <= x <= most)
        several = "rounds" if self.rounds else "max_metric_drop" if self.max_metric_drop is not None else None
        if self.max_metric_drop is not None:
            check_drop(self.max_metric_drop)
            if self.rounds:
                raise ValueError("max_metric_drop makes rounds of its own; leave rounds unset.")
        if self.order == "sequential" and self.decision == "none":
            raise ValueError("order='sequential' probes block after block, and decision='none' probes nothing.")
        if several is None:
            return
        if self.order == "sequential":
            raise ValueError(f"{several} is for order='joint': a sequential order decides about every block once.")
        if self.group is not None:
            raise ValueError(f"pattern={self.pattern!r} has one sparsity only; leave {several} unset.")
        if self.strategy == "sparsegpt" or self.decision == "threshold":
            decided = f"strategy={self.strategy!r}" if self.strategy == "sparsegpt" else f"decision={self.decision!r}"
            raise ValueError(f"{several} decides at several sparsities, which {decided} cannot; leave {several} unset.")
        if self.rounds and self.decision == "none" and self.strategy != "fisher":
            raise ValueError(f"rounds probe again at every sparsity, and strategy={self.strategy!r} makes no probe.")

    def _resolved_sparsity(self) -> float:
        if self.rounds:
            if self.sparsity not in (None, self.rounds[-1]):
                raise ValueError(
                    f"sparsity={self.sparsity} is not the last of rounds={tuple(self.rounds)}; leave it unset."
                )
            return self.rounds[-1]
        implied = None if self.group is None else 1 - self.group[0] / self.group[1]
        if self.sparsity is None:
            return 0.5 if implied is None else implied
        _number("sparsity", self.sparsity, "a fraction in [0, 1), 0.5 for half of the weights", lambda x: 0 <= x < 1)
        if implied is not None and not math.isclose(self.sparsity, implied):
            raise ValueError(
                f"sparsity={self.sparsity} contradicts pattern={self.pattern!r}, which prunes exactly {implied:g} "
                "of the weights; leave sparsity unset."
            )
        return float(self.sparsity)

    @property
    def final_sparsity(self) -> float:
        assert self.sparsity is not None, "resolved when the configuration was made"
        return self.sparsity

    @property
    def first_level(self) -> float:
        """The sparsity of the first trial of a schedule with `max_metric_drop`."""
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
        """The scope in which candidates are chosen."""
        assert self.strategy is not None, "resolved when the configuration was made"
        return self.scope or STRATEGY_SCOPE[self.strategy]

    @property
    def decision_scope(self) -> Scope:
        """The scope in which the final budget is spent."""
        return self.scope or ("global" if self.decision == "path" else self.candidate_scope)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` gives the same configuration back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GradProbeConfig:
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}."
                raise ValueError(f"unknown option {name!r}; {hint}")
        return cls(**values)

    def to_yaml(self, path: str | Path) -> None:
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def from_yaml(cls, path: str | Path) -> GradProbeConfig:
        return cls.from_dict(read_yaml(path))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `gradprobe_config.json` into `directory`."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **hub_kwargs: Any) -> GradProbeConfig:
        """Read `gradprobe_config.json` from a folder or a Hub repository (`hub_kwargs`: revision, token, ...)."""
        folder = Path(name_or_path)
        path = (
            folder / CONFIG_NAME if folder.is_dir() else hf_hub_download(str(name_or_path), CONFIG_NAME, **hub_kwargs)
        )
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _whole(name: str, value: object, at_least: int, other: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be {other}a whole number >= {at_least}, got {value!r}.")


def _number(name: str, value: object, wanted: str, holds: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def _threshold(value: Any) -> GradientThreshold:
    if value == "adaptive":
        return "adaptive"
    if isinstance(value, Mapping) and value:
        patterns = _patterns("gradient_threshold", tuple(value))
        for pattern in patterns:
            _number(f"gradient_threshold[{pattern!r}]", value[pattern], "a finite number >= 0", lambda x: x >= 0)
        return {pattern: float(value[pattern]) for pattern in patterns}
    wanted = "a finite number >= 0, a dict from patterns to such numbers, or 'adaptive'"
    _number("gradient_threshold", value, wanted, lambda x: x >= 0)
    return value


def _rounds(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"rounds must be a list of sparsities, like (0.2, 0.35, 0.5), got {value!r}.")
    for sparsity in value:
        _number("rounds", sparsity, "fractions in (0, 1)", lambda x: 0 < x < 1)
    if list(value) != sorted(set(value)):
        raise ValueError(f"rounds must rise from each sparsity to the next, got {value!r}.")
    return tuple(map(float, value))


def check_drop(value: Any) -> None:
    """Raise ValueError unless it is a number, or one with a percent sign."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value):
        return
    _number("max_metric_drop", value, "a number >= 0, or a share like '5%'", lambda x: x >= 0)


def _patterns(name: str, value: object) -> tuple[str, ...]:
    """A tuple of non-empty patterns, whose regular expressions compile; one string alone is one pattern."""
    if not isinstance(value, (str, list, tuple, set, frozenset, type(None))):
        raise ValueError(f"{name} must be a pattern or a list of patterns, got {value!r}.")
    given = (value,) if isinstance(value, str) else tuple(value or ())
    for pattern in given:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{name} must hold names, globs or 're:...' patterns, got {pattern!r}.")
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}.") from error
    return given
