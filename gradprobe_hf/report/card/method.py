"""What a card says of the method: what decided, and in which steps."""

from __future__ import annotations

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.report.original import DENSE, Original
from gradprobe_hf.report.percent import asked_percent
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES
from gradprobe_hf.structures.table import STRUCTURES, shape_words

UNITS = {"global": "the whole model", "block": "each block", "tensor": "each matrix", "row": "each row"}


def describe_method(config: GradProbeConfig, original: Original = DENSE) -> str:
    """One paragraph that says what decided, and in which steps. Args: original: what was pruned."""
    return " ".join([_decision(config), *_schedule(config, original)])


def _decision(config: GradProbeConfig) -> str:
    """The sentences of the method's rows, with what the configuration sets in them."""
    if config.structure is not None:
        return f"{_structures(config)} {config.update_row.sentence}{_damping(config)}"
    unit = UNITS[config.budget_scope]
    if config.order == "sequential" and config.budget_scope == "global":
        unit = "the blocks of each step"
    if config.group:
        unit = f"every group of {config.group[1]} inputs, of which {config.group[0]} are kept"
    fisher = FISHER_ESTIMATES[config.fisher].sentence
    updated = config.update_row.sentence.format(unit=unit) + _damping(config)
    if config.score_row is None:
        return updated
    decided = config.decision_row.sentence.format(
        score=config.score_row.sentence.format(fisher=fisher),
        score_name=config.score,
        fisher=fisher,
        unit=unit,
        candidate_unit=UNITS[config.candidate_scope],
        threshold=_threshold(config.gradient_threshold),
        limit=_limit(config),
        reduction_factor=f"{config.reduction_factor:g}",
    )
    return f"{decided} {updated}"


def _damping(config: GradProbeConfig) -> str:
    """Where it was chosen and not given."""
    chosen = " How near they stay to what they were was chosen for each matrix on calibration rows that were held out."
    return chosen * config.holds_out


def _structures(config: GradProbeConfig) -> str:
    """What went whole, and why that."""
    said = [f"Whole structures were removed: {shape_words(config.amounts)}."]
    for row in (STRUCTURES[name] for name in config.amounts):
        if row.included:
            said.append(f"Each {row.unit} went with {row.included}.")
    if config.drops_blocks:
        said.append("Blocks went one after the other, each time the one without which the calibration loss was lowest.")
    if config.drops_experts:
        said.append(
            "Inside a block those experts went whose gate, a factor on what an expert hands on, had the lowest Fisher "
            "information on the calibration text."
        )
    return " ".join([*said, *_unit_sentences(config)])


def _unit_sentences(config: GradProbeConfig) -> list[str]:
    """Why those channels and heads: once, where it is the same for both."""
    own = {name: score.sentence for name, score in config.unit_scores.items()}
    if len(set(own.values())) < 2:
        return list(own.values())[:1]
    return [f"Of {STRUCTURES[name].units}: {said[0].lower()}{said[1:]}" for name, said in own.items()]


def _limit(config: GradProbeConfig) -> str:
    if not config.spike_limit:
        return ""
    return (
        "In the second measurement a sequence's gradient was scaled down wherever its energy exceeded "
        f"{config.spike_limit:g} times that of the first. "
    )


def _threshold(threshold: GradientThreshold) -> str:
    if isinstance(threshold, (int, float)):
        return f"a factor of {1 + threshold:g}"
    if threshold == "adaptive":
        return "a factor of one and the square root of its matrix's size in mean matrices"
    parts = ", ".join(f"{1 + value:g} (`{pattern}`)" for pattern, value in dict(threshold).items())
    return f"a factor that depends on the matrix: {parts}"


def _schedule(config: GradProbeConfig, original: Original) -> list[str]:
    said = []
    if config.order == "sequential":
        said.append(
            f"This was done for {config.blocks_per_step} blocks at a time, in {config.block_order} order, each step "
            "probed on the model as pruned so far."
        )
    if config.rounds:
        rounds = ", ".join(map(asked_percent, config.rounds))
        said.append(f"This was done in rounds ({rounds}), each probed on the model as the one before would prune it.")
    if config.max_metric_drop is not None:
        said.append(
            f"The sparsity is the largest that was found whose metric is within {config.max_metric_drop} of "
            f"{original.whose}, up to {asked_percent(config.final_sparsity)}."
        )
    if config.updates and config.dense_target:
        said.append(
            f"The outputs to keep were taken {asked_percent(config.dense_target)} of the way from the model as pruned "
            f"so far to {original.name}."
        )
    if config.refines:
        said.append(config.refinement_row.sentence)
    if config.bounds is not None:
        low, high = config.bounds
        said.append(f"Of every matrix at least {asked_percent(low)} and at most {asked_percent(high)} went.")
    return said
