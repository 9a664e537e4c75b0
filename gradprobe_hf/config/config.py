"""GradProbeConfig: everything that decides the result, validated when it is made.

What is *not* here: where the model and the text come from. Those are arguments of `prune_pretrained`, so that one
configuration serves many models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError

from gradprobe_hf.config.options import Options
from gradprobe_hf.config.presets import (
    DEFAULT_OF_TWO_PROBES,
    DEFAULT_PRESET,
    METHOD,
    OF_TWO_PROBES,
    PRESETS,
    PRESETS_IN_GROUPS,
    Preset,
)
from gradprobe_hf.config.values import (
    AccumulatorDevice,
    AccumulatorDtype,
    BlockOrder,
    EvaluationProtocol,
    GradientThreshold,
    Order,
    check_values,
)
from gradprobe_hf.data.text_options import DEFAULT_LENGTH, TextOptions
from gradprobe_hf.decisions.needs import Needs, needs_of, uses_fisher
from gradprobe_hf.decisions.table import DECISIONS, Decision
from gradprobe_hf.runtime.names_elsewhere import PRUNING, NamesElsewhere
from gradprobe_hf.runtime.option_checks import number, patterns, rounds, threshold
from gradprobe_hf.runtime.paths import looks_like_path
from gradprobe_hf.scores.budget import Budget, Scope
from gradprobe_hf.scores.table import SCORES, Score
from gradprobe_hf.structures.budgets import BUDGETS, ShapeBudget
from gradprobe_hf.structures.table import AUTO, STRUCTURES, checked
from gradprobe_hf.structures.unit_scores import UNIT_SCORES, UnitScore
from gradprobe_hf.tasks.table import TASKS
from gradprobe_hf.updates.refinement import REFINEMENTS, Refinement
from gradprobe_hf.updates.table import UPDATES, WeightUpdate

CONFIG_NAME = "gradprobe_config.json"
LARGEST_GROUP = 256
LEAST_DAMPING = 0.01
# Options about single weights, which whole structures have no use for; and what those come to, with a structure.
NOT_OF_STRUCTURES = (
    *("sparsity", "pattern", "preset", "score", "probes", "rule", "scope", "fisher", "gradient_threshold"),
    *("min_matrix_sparsity", "max_matrix_sparsity", "reduction_factor", "spike_limit", "order", "block_order"),
    *("blocks_per_step", "rounds", "max_metric_drop", "initial_sparsity", "sparsity_step", "include", "exclude"),
)
_OF_STRUCTURES: dict[str, Any] = {"sparsity": 0.0, "probes": 0, "rule": "budget"}


@dataclass(frozen=True, kw_only=True)
class GradProbeConfig(Options):
    """How to prune.

    Args:
        sparsity: fraction of the target weights to remove, in [0, 1). Default: 0.5, or what `pattern` implies.
        pattern: `"unstructured"`, or n:m, such as `"2:4"`, to keep at most n of every m consecutive inputs of a row.
            NVIDIA counts so, too.
        structure: whole parts to remove in place of single weights, so that the checkpoint is smaller wherever it is
            loaded: `{"ffn": 0.3, "kv_groups": 1, "blocks": 4}`. `"ffn"`: the share of the channels of every
            feed-forward network, of which a multiple of 64 is kept, or exactly how many go. `"kv_groups"`: how many
            key-value heads of every block go, each with the query heads that read it. `"experts"`: the share of the
            experts of every mixture, or how many go, with their rows of the router. `"blocks"`: how many blocks go.
            `"auto"`: the best of the shapes that meet a budget, `params`, `memory` or `latency`, as measured.
        params: with `structure="auto"`: the most parameters that are left, as a share of the model's (`0.75`) or a
            number (`"100M"`). Embeddings count.
        memory: with `structure="auto"`: the most bytes that the weights are left with as they are written, `"200MB"`.
        latency: with `structure="auto"`: the most time that a text takes, as a share of the dense model's (`0.7`), by a
            table that is measured on this machine: 512 tokens are read, and 32 written, one text at a time.
        preset: speed or quality: `"fast"` (`probes=1`), `"balanced"` (`probes=2`) or `"best"` (`probes=1,
            update="admm"`). With an n:m pattern: `update="sparsegpt"`, `update="sparsegpt+admm"`, or `probes=1,
            update="admm"`. Options that are given win over a preset. Default: `"best"`, where none of `score`,
            `probes`, `rule` and `update` is given, else no preset. `order="sequential"`, `reduction_factor` and
            `spike_limit` are about two probes: with these it is `"balanced"`.
        score: criterion that ranks the weights. One of `"fisher"`, `"wanda"`, `"magnitude"` and `"random"`. Default:
            `"fisher"`.
        probes: how often the loss gradient is measured over the calibration data. 1: the score decides. 2: the
            gradient is measured again with the weights that the score would remove shrunk. 0: the score decides,
            without any gradient. Default: the preset's; without one 2 with `score="fisher"`, else 0.
        rule: how two probes decide: by an exact `"budget"`, or by the `"threshold"` of the original GradProbe. With the
            former every weight is scored by both probes; with the latter the budget is an upper bound. Default:
            `"budget"`.
        scope: what one budget is spent over. One of `"global"`, `"block"`, `"tensor"` and `"row"`. Default:
            `"global"` with `score="fisher"` or two probes, else the scope the score was published with. That is row
            for Wanda, tensor for magnitude and random.
        fisher: estimate of the squared gradient. `"sequence"`, `"token"`, `"factored"`, or `"blend"`, the geometric
            mean of sequence and factored.
        importance: which channels and heads go with `structure`. `"obs"`: those that the others can make up for best.
            `"fisher"`: those whose gate has the least Fisher information. `"obs+fisher"`: both, an error that
            the others leave weighted by how much the loss depends on it; it fails where a block has massive
            activations. `"wanda"`, `"taylor"` and `"random"` are baselines. Default: `"fisher"` for channels, `"obs"`
            for heads.
        structure_rounds: in how many portions experts go, and channels and heads by `importance="fisher"` or
            `"taylor"`; before each the gates are measured anew, in the model without those that went before. Others go
            before the first, all at once. There are no more portions than units that go.
        update: how the kept weights change to preserve each matrix's outputs on the calibration inputs. `"none"`: not
            at all. `"obs"`: by SparseGPT's sweep under the mask that was decided. `"least_squares"`: to the best
            weights under it. `"admm"`: to these, after revising the mask within each matrix (row, group).
            `"sparsegpt"` chooses the mask itself, without score or probe; `"sparsegpt+least_squares"` and
            `"sparsegpt+admm"` go on from there. Default: the preset's, else `"none"`; with `structure`
            `"least_squares"`.
        dense_target: which outputs an update preserves, from 0 (as pruned so far) to 1 (of the dense model). As
            pruned so far: those of the original matrix on the inputs that the pruned blocks before it give. Default:
            0.25; 0.5 with `update="obs"`, 0 with `update="sparsegpt"`, as published.
        damping: what is added to the diagonal of a Hessian before it is inverted, as a fraction of its mean, > 0.
            `"auto"`, with `update="least_squares"`: for each matrix that of 0.01 to 1 with which its outputs on an
            eighth of the calibration rows, held out from the others, are kept best; structures that go whole take
            that unless told otherwise.
        refinement: what is trained of a block behind the update of its matrices, under a mask that is fixed. `"none"`:
            nothing. `"blocks"`: its kept weights, the gains of its norms and its biases, until its outputs are those of
            the dense block.
        recovery_steps: steps in which all kept weights are trained towards the dense model's predictions, after
            pruning, on more of the calibration's text. 0: none.
        recovery_learning_rate: highest learning rate of these steps, > 0.
        min_matrix_sparsity: least fraction to remove from any matrix, where one budget covers several.
        max_matrix_sparsity: largest fraction to remove from any matrix, so that none is emptied.
        gradient_threshold: relative growth of a gradient that `rule="threshold"` tolerates, >= 0. A dict has one for
            each pattern of matrices, `{"*.mlp.*": 0.5, "*": 0.1}`, of which the first that matches counts.
            `"adaptive"` goes by size: `sqrt(weights / mean weights of a matrix)`.
        reduction_factor: factor that candidates are shrunk by for the second probe, in [0, 1).
        spike_limit: largest growth of one sequence's gradient energy at a matrix between the probes, >= 0 (0: no
            limit). What grows more is scaled down to it.
        order: decide about all blocks at once (`"joint"`), or step by step (`"sequential"`). Joint takes two probes
            whatever the depth. In a sequential order each step of blocks is probed on the model as pruned so far, and
            has its share of the budget.
        block_order: where a sequential order begins: at the first block (`"forward"`), the last (`"reverse"`), or the
            largest (`"size"`).
        blocks_per_step: blocks that one step of a sequential order decides about.
        rounds: rising sparsities, each probed on the model as the one before would prune it. The last is `sparsity`;
            every round decides anew about every weight.
        max_metric_drop: prune as much as possible, up to `sparsity`, without perplexity rising, or the task's `metric`
            getting worse, by more than this, absolute (`1.5`) or relative (`"5%"`). One half of the evaluation chooses,
            the other is reported. `prune_pretrained` takes another metric as its `metric_fn`.
        initial_sparsity: sparsity of the first attempt with `max_metric_drop`. Default: `sparsity_step`.
        sparsity_step: distance between two attempts with `max_metric_drop`, before bisection.
        include: patterns of modules to prune: exact names, ends of names (`"q_proj"`), globs, or `"re:..."`. When
            given, only what they match is pruned, embeddings and output head included if matched.
        exclude: patterns of modules to leave dense.
        task: what the model is for, as the Hub calls it: `"text-generation"`, `"text-classification"`, ... It decides
            how a checkpoint is loaded, how rows of a data set become batches, and which metric is measured. Default:
            what the checkpoint's class is for.
        label_column: column of the data set with the labels, or with the texts that are to be written. Default: one of
            a usual name, such as `label`.
        metric: what is measured beside the loss, and what `max_metric_drop` is about: `"accuracy"`, `"f1"` (the mean of
            all classes), `"wer"` or `"bleu"`. Default: what is usual for the task, `"accuracy"` for a classifier;
            perplexity for a language model.
        num_samples: calibration windows, or rows of a labelled or tokenised dataset.
        sequence_length: tokens in a window. Default: 512, or as many as the model has positions.
        text_column: column of the data set with the text, or with the messages of a chat. Default: `messages`,
            `conversations`, `prompt` and `completion`, `text`, or the only column of texts.
        text_template: several columns as one text, `"{instruction}\\n{output}"` say.
        assistant_only_loss: count only what the assistant says in a chat, and what ends its turn. Without it all tokens
            count, the user's too. Of text that is no chat all count: calibrate on chats, and evaluate on either.
        packing: cut windows from all documents joined. Otherwise each window is one document, cut off at
            `sequence_length`, or padded and masked.
        document_separator: what is between documents that are packed: a text, or `"eos"` for the tokenizer's EOS token.
            Default: a blank line between texts, nothing between chats.
        add_special_tokens: begin each window of text as the tokenizer begins a text, with a BOS say, which counts as
            one of the window's tokens. BERT-like models: end it so, too.
        evaluation_samples: windows to measure perplexity on, or rows. Default: 20 windows; of labelled rows 1,000, or
            as many as there are.
        evaluation_protocol: how an evaluation text is cut: into `"windows"` that are drawn from it, or as in a
            `"paper"` (GPTQ, SparseGPT, Wanda), whole, in consecutive windows of the model's context, at most 2,048
            tokens. The latter's default text is WikiText-2's raw test split.
        measure_speed: time what is left with `structure`, and its memory, beside the dense model, for report and card:
            models of these shapes with random weights read and write a text in turns, as in `gradprobe bench`. With
            `"auto"` all shapes that were tried. It takes minutes.
        seed: seed of calibration windows, random scores and generated text.
        batch_size: windows in one forward pass: memory and speed, never the result. `"auto"`: the largest that fits.
        checkpointing: recompute each block in the backward pass instead of storing its activations. `"auto"`: where
            they would not fit in memory.
        accumulator_dtype: type that statistics are stored in: 4, 2 or about 1 byte per weight and term. `"int8"` is
            block-scaled and logarithmic (1.03 bytes); it and `"bfloat16"` are rounded stochastically.
        accumulator_device: where statistics are stored: with the weights (`"same"`), in host memory (`"cpu"`), or in
            files (`"disk"`). `"auto"`: the first of them that has room beside a pass.
        save_every: batches between two snapshots of a run with `resume_dir`.
    """

    elsewhere: ClassVar[NamesElsewhere] = PRUNING
    # The target.
    sparsity: float | None = None
    pattern: str = "unstructured"
    structure: Mapping[str, int | float] | Literal["auto"] | None = None
    params: int | float | str | None = None
    memory: int | str | None = None
    latency: float | None = None
    preset: Preset | None = None
    # The method.
    score: str | None = None
    probes: int | None = None
    rule: str | None = None
    scope: Scope | None = None
    fisher: str = "blend"
    importance: str | None = None
    structure_rounds: int = 1
    update: str | None = None
    dense_target: float | None = None
    damping: float | Literal["auto"] = 0.01
    refinement: str = "none"
    recovery_steps: int = 0
    recovery_learning_rate: float = 2e-4
    min_matrix_sparsity: float | None = None
    max_matrix_sparsity: float | None = None
    gradient_threshold: GradientThreshold = 0.0
    reduction_factor: float = 0.1
    spike_limit: float = 2.0
    # In which steps.
    order: Order = "joint"
    block_order: BlockOrder = "forward"
    blocks_per_step: int = 1
    rounds: Sequence[float] = ()
    max_metric_drop: float | str | None = None
    initial_sparsity: float | None = None
    sparsity_step: float = 0.1
    # Which matrices, and on what text.
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    task: str | None = None
    label_column: str | None = None
    metric: str | None = None
    num_samples: int = 128
    sequence_length: int | None = None
    text_column: str | None = None
    text_template: str | None = None
    assistant_only_loss: bool = False
    packing: bool = True
    document_separator: str | None = None
    add_special_tokens: bool = True
    evaluation_samples: int | None = None
    evaluation_protocol: EvaluationProtocol = "windows"
    measure_speed: bool = False
    seed: int = 0
    # With which memory; no result depends on these but by rounding.
    batch_size: int | Literal["auto"] = 4
    checkpointing: bool | Literal["auto"] = "auto"
    accumulator_dtype: AccumulatorDtype = "float32"
    accumulator_device: AccumulatorDevice | Literal["auto"] = "auto"
    save_every: int = 16

    def __new__(cls, *values: Any, **options: Any) -> GradProbeConfig:
        made = super().__new__(cls, *values, **options)
        object.__setattr__(made, "_given", _named(options))
        return made

    def __post_init__(self) -> None:
        self._check_types()
        self._fill(self._preset_values())
        self._resolve_method()
        object.__setattr__(self, "gradient_threshold", threshold(self.gradient_threshold))
        object.__setattr__(self, "rounds", rounds(self.rounds))
        for name in ("include", "exclude"):
            object.__setattr__(self, name, patterns(name, getattr(self, name)))
        object.__setattr__(self, "sparsity", self._resolved_sparsity())
        self._check_rows()
        self._check_task()
        self._check_scope()
        self._check_bounds()
        self._check_schedule()
        self._check_effect()
        if self.dense_target is None and self.updates:
            object.__setattr__(self, "dense_target", self.update_row.dense_target)

    def _check_types(self) -> None:
        """Values that are wrong by themselves."""
        check_values({name: getattr(self, name) for name in _DEFAULTS}, _DEFAULTS)
        TextOptions.of(self)  # refuses what is wrong in it

    def _preset_values(self) -> dict[str, Any]:
        """What the preset comes to, beside the options that are given."""
        is_free = all(getattr(self, name) is None for name in METHOD) and self.structure is None
        preset = self.preset or (self._default_preset() if is_free else None)
        if preset is None:
            return {}
        if self.group is not None and is_free:
            return PRESETS_IN_GROUPS[preset]
        values = dict(PRESETS[preset])
        chooses_mask = self.update is not None and UPDATES[self.update].chooses_mask
        scores_alone = self.score is not None and SCORES[self.score].measured != "gradients"
        # One probe is no choice where the update, or a score that needs none, is given.
        if chooses_mask or (scores_alone and values.get("probes") == 1):
            values.pop("probes", None)
        return values

    def _default_preset(self) -> Preset:
        two_probes = any(getattr(self, name) != _DEFAULTS[name] for name in OF_TWO_PROBES)
        return DEFAULT_OF_TWO_PROBES if two_probes and self.group is None else DEFAULT_PRESET

    def _fill(self, values: Mapping[str, Any]) -> None:
        """Set what is not given."""
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _resolve_method(self) -> None:
        """Score, probes, rule and update, each as given or by default; only some go together."""
        if self.structure is not None:
            self._resolve_structure(self.structure)
            return
        for name in BUDGETS:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect here: it belongs to structure='auto'. Set that, or "
                    f"leave {name} unset."
                )
        self._fill({"update": "none"})
        if self.update_row.chooses_mask:
            resolved = {"score": None, "probes": 0, "rule": "budget"}
            for name, value in resolved.items():
                if getattr(self, name) not in (None, value):
                    raise ValueError(
                        f"{self._refusal('update', name, self.update_row.refuses[name])}; leave {name} unset."
                    )
                object.__setattr__(self, name, value)
            return
        self._fill({"score": "fisher", "rule": "budget"})
        score = SCORES[self.score or ""]
        deciding = [row for row in DECISIONS.values() if row.rule == self.rule]
        known = {probes for row in deciding for probes in row.probes}
        self._fill({"probes": score.default_probes if score.default_probes in known else max(known)})
        if self.probes not in known:
            raise ValueError(f"rule={self.rule!r} needs probes={max(known)}, got probes={self.probes}.")
        if score.measured == "gradients" and self.probes == 0:
            raise ValueError(f"score={self.score!r} is measured by a probe: set probes=1 or probes=2, got probes=0.")
        if score.measured != "gradients" and self.probes == 1:
            raise ValueError(
                f"score={self.score!r} takes no probe: set probes=0 to prune by it alone, or probes=2 to decide about "
                "its candidates by two probes, got probes=1."
            )

    def _resolve_structure(self, structure: Mapping[str, float] | Literal["auto"]) -> None:
        """Whole structures go: no weight has a score or a budget."""
        object.__setattr__(self, "structure", checked(structure))
        self._check_budget()
        for name in NOT_OF_STRUCTURES:
            value = getattr(self, name)
            value = tuple(value) if isinstance(value, list) else value
            if value != _DEFAULTS[name] and value != _OF_STRUCTURES.get(name, _DEFAULTS[name]):
                both = ", and prune the smaller checkpoint once more: zeros go on top" * (
                    name in ("sparsity", "pattern")
                )
                raise ValueError(
                    f"{self._refusal('structure', name, 'it says itself how much goes, and of what')}; leave {name} "
                    f"unset{both}."
                )
        self._fill({"update": "least_squares"})
        for name, value in _OF_STRUCTURES.items():
            object.__setattr__(self, name, value)
        if "damping" not in self.given and self.update_row.chooses_damping:
            object.__setattr__(self, "damping", AUTO)

    def _check_budget(self) -> None:
        """A budget beside `"auto"`, and only there."""
        if self.shape_budget is not None:
            return
        for name in BUDGETS:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{self._refusal('structure', name, 'it says itself how much goes')}; leave {name} unset, or set "
                    "structure='auto'."
                )

    def _refusal(self, option: str, other: str, why: str) -> str:
        return (
            f"{option}={getattr(self, option)!r} cannot be combined with {other}={getattr(self, other)!r}: "
            f"{why.format(option=other)}"
        )

    def _check_rows(self) -> None:
        """What each row of the method says it cannot be combined with."""
        rows = {"score": self.score_row, "rule": self.decision_row, "update": self.update_row}
        for option, row in rows.items():
            for other, why in (row.refuses if row else {}).items():
                if other not in METHOD and getattr(self, other) != _DEFAULTS[other]:
                    raise ValueError(f"{self._refusal(option, other, why)}; leave {other} unset.")

    def _check_task(self) -> None:
        """A metric has to be one of the task's, where that is given."""
        if self.task is None:
            return
        first = TASKS[self.task][0]
        if self.metric is not None:
            first.metric(self.metric)
        if self.label_column is not None and not first.labels:
            raise ValueError(
                f"label_column={self.label_column!r} has no effect here: task={self.task!r} reads no labels. Leave "
                "label_column unset."
            )

    def _check_scope(self) -> None:
        if self.scope is None:
            return
        if self.group is not None:
            raise ValueError(
                f"scope={self.scope!r} cannot hold with pattern={self.pattern!r}, which spends its budget in every "
                "group of inputs; leave scope unset."
            )
        if self.update_row.chooses_mask and self.scope != self.update_row.scope:
            raise ValueError(
                f"update={self.update!r} spends its budget over scope={self.update_row.scope!r}, not over "
                f"scope={self.scope!r}; leave scope unset."
            )

    def _check_bounds(self) -> None:
        if self.bounds is None:
            return
        low, high = self.bounds
        wanted = f"0 <= min_matrix_sparsity <= sparsity ({self.final_sparsity:g}) <= max_matrix_sparsity <= 1"
        if not 0 <= low <= min(self.rounds or (self.final_sparsity,)) <= self.final_sparsity <= high <= 1:
            raise ValueError(f"a budget between the bounds needs {wanted}, got {low:g} and {high:g}.")
        if self.group is not None or self.budget_scope not in ("global", "block"):
            spent = f"pattern={self.pattern!r}" if self.group else f"scope={self.budget_scope!r}"
            raise ValueError(f"{spent} prunes every matrix alike: bounds on matrices are for 'global' and 'block'.")

    def _check_schedule(self) -> None:
        if self.initial_sparsity is not None and self.max_metric_drop is not None:
            most = self.final_sparsity
            number("initial_sparsity", self.initial_sparsity, f"a fraction in [0, {most:g}]", lambda x: 0 <= x <= most)
        several = "rounds" if self.rounds else "max_metric_drop" if self.max_metric_drop is not None else None
        if self.rounds and self.max_metric_drop is not None:
            raise ValueError("max_metric_drop makes rounds of its own; leave rounds unset.")
        if self.order == "sequential" and not self.decision_row.has_second_probe:
            raise ValueError(
                f"order='sequential' probes one step of blocks after the other: set probes=2, got probes={self.probes}."
            )
        if several is None:
            return
        if self.order == "sequential":
            raise ValueError(
                f"{several}={getattr(self, several)!r} is for order='joint': a sequential order decides about every "
                "block once."
            )
        if self.group is not None:
            raise ValueError(f"pattern={self.pattern!r} has one sparsity only; leave {several} unset.")
        if self.rounds and not self.needs.probes:
            raise ValueError(
                f"rounds={self.rounds!r} probe again at every sparsity, and score={self.score!r} makes no probe."
            )

    def _check_effect(self) -> None:
        """Refuse options that would be accepted and change nothing."""
        if self.holds_out and not self.update_row.chooses_damping:
            raise ValueError(
                f"damping='auto' is chosen by update='least_squares', got update={self.update!r}: set that, or a "
                "number."
            )
        for name, (has_effect, belongs_to) in _BELONGS.items():
            if getattr(self, name) != _DEFAULTS[name] and not has_effect(self):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect here: it belongs to {belongs_to}. Set that, or "
                    f"leave {name} unset."
                )

    def _resolved_sparsity(self) -> float:
        if self.rounds:
            if self.sparsity not in (None, self.rounds[-1]):
                raise ValueError(
                    f"sparsity={self.sparsity} is not the last of rounds={tuple(self.rounds)}; leave it unset."
                )
            return self.rounds[-1]
        if self.structure is not None:
            return 0.0
        implied = None if self.group is None else 1 - self.group[0] / self.group[1]
        if self.sparsity is None:
            return 0.5 if implied is None else implied
        number("sparsity", self.sparsity, "a fraction in [0, 1), 0.5 for half of the weights", lambda x: 0 <= x < 1)
        if implied is not None and not math.isclose(self.sparsity, implied):
            raise ValueError(
                f"sparsity={self.sparsity} contradicts pattern={self.pattern!r}, which prunes exactly {implied:g} "
                "of the weights; leave sparsity unset."
            )
        return float(self.sparsity)

    @property
    def given(self) -> frozenset[str]:
        """The options that were passed; the others are what these, or the defaults, come to."""
        found: frozenset[str] = self.__dict__["_given"]  # no field: it is no part of what the configuration is
        return found

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
            return Needs(frozenset({"gates"}), "probe") if probes else Needs(frozenset(), "forward")
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

    def score_alone(self) -> GradProbeConfig:
        """The same without a second probe, without steps and bounds: what proposes the candidates of all steps."""
        return self.varied(
            probes=1 if self.needs.probes and self.score_row and self.score_row.measured == "gradients" else 0,
            rule="budget",
            order="joint",
            min_matrix_sparsity=None,
            max_matrix_sparsity=None,
            preset=None,
        )

    def budget_of(self, sparsity: float) -> Budget:
        """What the decision spends at a sparsity."""
        return Budget(sparsity, self.budget_scope, self.group, self.bounds)

    def varied(self, **changes: Any) -> GradProbeConfig:
        """A copy with these changes.

        Options that have no effect in it any more fall back to their defaults, and a damping that was a default is
        decided anew: what serves one update is an error with another.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: value for name, value in values.items() if name not in _BELONGS} | changes
        plain = GradProbeConfig(**values)
        kept = {name for name, (has_effect, _) in _BELONGS.items() if has_effect(plain) and name not in changes}
        kept -= {"damping"} - self.given
        found = replace(plain, **{name: getattr(self, name) for name in kept if getattr(self, name) is not None})
        object.__setattr__(found, "_given", self.given | _named(changes))
        return found

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `gradprobe_config.json` into `directory`."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **hub_kwargs: Any) -> GradProbeConfig:
        """Read `gradprobe_config.json` from a folder or a Hub repository (`hub_kwargs`: revision, token, ...)."""
        folder = Path(name_or_path)
        path = folder / CONFIG_NAME if folder.exists() else _fetched(str(name_or_path), hub_kwargs)
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"{name_or_path} has no {CONFIG_NAME}: it was not pruned with this.") from error
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return cls._of_file(path, values)


def _named(options: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in options.items() if value is not None)


def _fetched(name: str, hub_kwargs: Mapping[str, Any]) -> str:
    """The file of a Hub repository."""
    if looks_like_path(name):
        raise FileNotFoundError(f"no such folder: {name!r}.")
    try:
        return hf_hub_download(name, CONFIG_NAME, **hub_kwargs)
    except (OSError, HFValidationError) as error:
        raise OSError(f"cannot get {CONFIG_NAME} of {name!r} from the Hub: {error}") from error


def resolve_config(config: GradProbeConfig | None) -> GradProbeConfig:
    """The configuration that was passed, or the default one.

    Raises:
        TypeError: something else was passed; the message says what makes a configuration of it.
    """
    if config is None or isinstance(config, GradProbeConfig):
        return config or GradProbeConfig()
    remedy = ""
    if isinstance(config, Mapping):
        remedy = ": GradProbeConfig.from_dict makes one of it"
    elif isinstance(config, float):
        remedy = f": GradProbeConfig(sparsity={config!r}), say"
    elif isinstance(config, (str, Path)):
        remedy = ": GradProbeConfig.from_yaml reads one from a file"
    elif config is GradProbeConfig:
        remedy = ": GradProbeConfig() is one"
    elif callable(config):
        remedy = "; a tokenizer is passed as processing_class="
    shown = config if isinstance(config, (str, Path, int, float, dict)) else type(config).__name__
    raise TypeError(f"config must be a GradProbeConfig, got {type(config).__name__} ({shown!r}){remedy}.")


# Options of one part of a method -> whether that part is there, and what it is.
_BELONGS: dict[str, tuple[Callable[[GradProbeConfig], bool], str]] = {
    "fisher": (lambda c: c.uses_fisher, "score='fisher', or probes=2 with rule='budget'"),
    "gradient_threshold": (lambda c: c.decision_row.filters is not None, "rule='threshold'"),
    "reduction_factor": (lambda c: c.decision_row.has_second_probe, "probes=2"),
    "spike_limit": (lambda c: c.decision_row.limits_spikes, "probes=2 with rule='budget'"),
    "dense_target": (lambda c: c.updates, "a weight update (update='admm', ...)"),
    "importance": (lambda c: c.weighs_units, "structure={'ffn': ...} or structure={'kv_groups': ...}"),
    "structure_rounds": (
        lambda c: bool(c.in_rounds),
        "channels by importance='fisher' or 'taylor', heads by one of these, and experts",
    ),
    "measure_speed": (lambda c: c.structure is not None, "structure"),
    "damping": (lambda c: c.updates or c.weighs_inputs, "a weight update (update='admm', ...)"),
    "recovery_learning_rate": (lambda c: c.recovery_steps > 0, "recovery_steps"),
    "block_order": (lambda c: c.order == "sequential", "order='sequential'"),
    "document_separator": (lambda c: c.packing, "packing=True"),
    "blocks_per_step": (lambda c: c.order == "sequential", "order='sequential'"),
    "evaluation_samples": (lambda c: c.evaluation_protocol == "windows", "evaluation_protocol='windows'"),
    "checkpointing": (
        lambda c: c.needs.probes,
        "a probe (score='fisher', probes=2, importance='fisher', or experts that go)",
    ),
    "accumulator_dtype": (lambda c: c.needs.accumulates, "a probe of weights (score='fisher', or probes=2)"),
    "accumulator_device": (lambda c: c.needs.accumulates, "a probe of weights (score='fisher', or probes=2)"),
    "initial_sparsity": (lambda c: c.max_metric_drop is not None, "max_metric_drop"),
    "sparsity_step": (lambda c: c.max_metric_drop is not None, "max_metric_drop"),
}
_DEFAULTS = {field.name: field.default for field in fields(GradProbeConfig)}
