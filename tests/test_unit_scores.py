"""What channels and heads are worth: gates against torch.autograd, each score against loops, and a run with each."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.estimation.expected_passes import expected_passes
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.engine import ProbePass, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.report.card.method import describe_method
from gradprobe_hf.run.shapes.unit_evidence import removed_blocks, units_that_stay
from gradprobe_hf.structures.importance import outputs_squared
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.unit_scores import (
    UNIT_SCORES,
    UnitEvidence,
    fisher_unit_scores,
    random_unit_scores,
    taylor_unit_scores,
    wanda_unit_scores,
)
from gradprobe_hf.updates.sweep import damping_of, inverse_factor
from tests import cases
from tests.reference import naive

GATED = {  # family -> amounts; none is looked at, but they tell which units there are
    "llama": {"ffn": 1, "kv_groups": 1},
    "gpt2": {"ffn": 1},
    "opt": {"ffn": 1, "kv_groups": 1},  # its heads can be weighed, though none can go
    "vit": {"ffn": 1, "kv_groups": 1},
}


def gate_gradients(model, rows, units):
    """Reader -> the derivative of each sequence's loss in explicit gates, one a row, `[rows, units]`."""
    found = {one.reader.name: [] for one in units}
    for row in rows:
        row = {name: value.double() if value.is_floating_point() else value for name, value in row.items()}
        gates = {one.reader.name: nn.Parameter(torch.ones(one.count, dtype=torch.float64)) for one in units}
        with ExitStack() as hooks:
            for one in units:
                module, gate = model.get_submodule(one.reader.parameter.rpartition(".")[0]), gates[one.reader.name]

                def gated(_module, args, gate=gate, width=one.width):
                    return (args[0] * gate.repeat_interleave(width),)

                hooks.callback(module.register_forward_pre_hook(gated).remove)
            loss = naive.sequence_loss(model, row)
        for (name, _), gradient in zip(gates.items(), torch.autograd.grad(loss, list(gates.values())), strict=True):
            found[name].append(gradient)
    return {name: torch.stack(gradients) for name, gradients in found.items()}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", GATED)
def test_gates_are_those_of_autograd(name, batch_size):
    model = cases.build(name, torch.float64)
    plan = Plan.of(model, find_targets(model), GATED[name])
    units = [one for _, one in units_that_stay(Removal(plan))]
    counts = {one.reader.name: one.count for one in units}
    readers = [one.reader for one in units]
    statistics = Statistics(readers, frozenset({"gates"}), model, units=counts)
    batches = [
        {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        for batch in cases.batches(name, batch_size=batch_size)
    ]
    run_probe(cases.workload(model, batches), ProbePass(readers, statistics))
    wanted = gate_gradients(model, cases.batches(name, batch_size=1), units)
    for one in units:
        each, found = wanted[one.reader.name], statistics[one.reader.name].gates
        torch.testing.assert_close(found.squares, each.square().sum(0), rtol=1e-9, atol=1e-20)
        torch.testing.assert_close(found.total, each.sum(0), rtol=1e-9, atol=1e-16)
        assert statistics[one.reader.name].reached


def test_gates_are_those_of_the_model_without_the_blocks_that_go():
    torch.manual_seed(0)
    model = cases.build("gpt_neox", torch.float64)  # with biases, which go too
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 4})
    model = type(model)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    targets, rows = find_targets(model), cases.batches("gpt_neox", batch_size=1)
    plan = Plan.of(model, targets, {"ffn": 1, "blocks": 2})
    removal = Removal(plan, frozenset(plan.blocks[1:3]))
    units = [one for _, one in units_that_stay(removal)]
    readers = [one.reader for one in units]
    statistics = Statistics(readers, frozenset({"gates"}), model, units={one.reader.name: one.count for one in units})
    gone, masks, biases = removed_blocks(_Context(model, targets), removal)
    work = cases.workload(model, rows)
    run_probe(work, ProbePass(readers, statistics, pruned=(gone, masks), new_weights=biases))
    model.gpt_neox.layers = nn.ModuleList([model.gpt_neox.layers[0], model.gpt_neox.layers[3]])
    shorter = [one for _, one in units_that_stay(Removal(Plan.of(model, find_targets(model), {"ffn": 1})))]
    wanted = gate_gradients(model, rows, shorter)
    for one, known in zip(units, wanted.values(), strict=True):
        torch.testing.assert_close(statistics[one.reader.name].gates.squares, known.square().sum(0), rtol=1e-9, atol=0)


class _Context:
    """The part of a run context that is read there."""

    def __init__(self, model, targets):
        self.model, self.targets = model, tuple(targets)


def test_each_score_is_what_its_formula_says():
    torch.manual_seed(1)
    x, d = torch.randn(3, 5, 6, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    weight = torch.randn(4, 6, dtype=torch.float64)
    squares, total, sparsely = ([0.0] * 3 for _ in range(3))
    for unit in range(3):
        for sequence in range(3):
            gate = 0.0
            for token in range(5):
                for column in (2 * unit, 2 * unit + 1):
                    for row in range(4):
                        gate += float(x[sequence, token, column] * weight[row, column] * d[sequence, token, row])
            squares[unit] += gate**2
            total[unit] += gate
        for column in (2 * unit, 2 * unit + 1):
            norm = sum(float(value) ** 2 for value in x[..., column].flatten()) ** 0.5
            sparsely[unit] += sum(abs(float(weight[row, column])) * norm for row in range(4))
    evidence = UnitEvidence(
        weight,
        3,
        "a.weight",
        0,
        input_sq=x.square().sum((0, 1)),
        gate_squares=torch.tensor(squares, dtype=torch.float64),
        gate_total=torch.tensor(total, dtype=torch.float64),
    )
    for function, wanted in (
        (wanda_unit_scores, sparsely),
        (fisher_unit_scores, squares),
        (taylor_unit_scores, [abs(value) for value in total]),
    ):
        torch.testing.assert_close(function(evidence), torch.tensor(wanted, dtype=torch.float64))
    for name, scores in (("wanda", sparsely), ("fisher", squares), ("taylor", [abs(value) for value in total])):
        going = UNIT_SCORES[name].chosen(evidence, 1)
        assert going.nonzero()[:, 0].tolist() == [scores.index(min(scores))]
    others = UnitEvidence(weight, 3, "b.weight", 0)
    assert not torch.equal(random_unit_scores(evidence), random_unit_scores(others))
    assert int(UNIT_SCORES["random"].chosen(others, 2).sum()) == 2


@pytest.mark.parametrize("width", [1, 2])
def test_an_error_that_the_others_leave_is_weighted_by_the_loss(width):
    """Errors by solving for the other columns; on most draws another unit goes than by the errors alone."""
    unlike = 0
    for seed in range(8):
        torch.manual_seed(seed)
        x, weight = torch.randn(30, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
        squares, hessian, count = torch.randn(6 // width, dtype=torch.float64).mul(3).exp(), x.T @ x, 6 // width
        errors, scores = [], []
        for unit in range(count):
            own = list(range(unit * width, (unit + 1) * width))
            rest = [column for column in range(6) if column not in own]
            outputs = x[:, own] @ weight[:, own].T
            best = torch.linalg.lstsq(x[:, rest], outputs).solution
            errors.append(float((outputs - x[:, rest] @ best).square().sum()))
            scores.append(errors[-1] * math.sqrt(float(squares[unit]) / float(outputs.square().sum())))
        known = {"inverse": hessian.inverse(), "output_sq": outputs_squared(weight, hessian, count)}
        evidence = UnitEvidence(weight, count, "a.weight", seed, **known, gate_squares=squares)
        going = UNIT_SCORES["obs+fisher"].chosen(evidence, 1)
        assert going.nonzero()[:, 0].tolist() == [scores.index(min(scores))]
        unlike += scores.index(min(scores)) != errors.index(min(errors))
    assert unlike > 2


def test_units_that_have_nearly_all_of_the_outputs_stay():
    """They make the mean that damping is a share of, which would count as the error of every other unit."""
    torch.manual_seed(0)
    x, weight = torch.randn(50, 12, dtype=torch.float64), torch.ones(4, 12, dtype=torch.float64)
    x[:, :2] *= 1000
    hessian = x.T @ x
    factor, took = inverse_factor(hessian, 0.01)
    known = {"inverse": factor.T @ factor, "output_sq": outputs_squared(weight, hessian, 12)}
    evidence = UnitEvidence(weight, 12, "a.weight", 0, **known, gate_squares=torch.ones(12, dtype=torch.float64))
    going = UNIT_SCORES["obs+fisher"].chosen(replace(evidence, damping=damping_of(hessian, took)), 2)
    assert not going[:2].any()
    assert UNIT_SCORES["obs+fisher"].chosen(evidence, 2)[:2].all()


@pytest.mark.parametrize("importance", UNIT_SCORES)
def test_a_run_takes_the_units_that_its_score_says(importance):
    model = cases.build("llama")
    config = GradProbeConfig(structure={"ffn": 8, "kv_groups": 1}, importance=importance, update="none")
    batches = cases.batches("llama")
    result = prune_pretrained(model, config, calibration=batches, evaluation=False, apply=False, progress=False)
    removal = result.removal
    sizes = {name: int(gone.sum()) for name, gone in removal.units.items()}
    assert set(sizes.values()) == {8, 1}
    assert result.report.config["importance"] == importance
    if importance in ("fisher", "taylor"):
        assert result.report.passes == {"forward": 1.0, "backward": 1.0}
        units = [one for _, one in units_that_stay(removal)]
        each = gate_gradients(model.double(), cases.batches("llama", batch_size=1), units)
        for one in units:
            known = each[one.reader.name]
            scores = known.square().sum(0) if importance == "fisher" else known.sum(0).abs()
            gone = removal.units[one.reader.name]
            assert scores[gone].max() < scores[~gone].min()


def test_each_structure_goes_by_its_own_score_where_none_is_asked_for():
    both, batches = {"ffn": 8, "kv_groups": 1}, cases.batches("llama")

    def run(**options):
        return cases.prune(cases.build("llama"), batches, **options, update="none")

    found = run(structure=both)
    channels, heads = run(structure=both, importance="fisher"), run(structure=both, importance="obs")
    assert found.report.passes == {"forward": 2.0, "backward": 1.0}  # a probe for the channels, a walk for the heads
    differ = {"ffn": 0, "kv_groups": 0}
    for name, units in units_that_stay(found.removal):
        reader = units.reader.name
        expected, other = (channels, heads) if name == "ffn" else (heads, channels)
        assert found.removal.units[reader].equal(expected.removal.units[reader])
        differ[name] += not found.removal.units[reader].equal(other.removal.units[reader])
    assert differ["ffn"] > 0
    said = describe_method(GradProbeConfig(structure=both))
    assert "Of FFN channels: inside a block those units went whose gate had the lowest Fisher information" in said
    assert "Of key-value heads: inside a block those units went that the others could make up for best" in said


def test_rounds_measure_gates_anew_without_what_went_before():
    """The second half goes by the gates of a model whose first half is zero; the same by hand, one round at a time."""
    model, batches = cases.build("llama"), cases.batches("llama")
    options = {"structure": {"ffn": 8}, "importance": "fisher", "update": "none"}
    found = cases.prune(model, batches, **options, structure_rounds=2)
    assert found.report.passes == {"forward": 2.0, "backward": 2.0}
    once = cases.prune(model, batches, **{**options, "structure": {"ffn": 4}})
    left = cases.build("llama").double()
    for target in once.targets:
        target.matrix(left).masked_fill_(once.masks[target.name], 0)
    units = [one for _, one in units_that_stay(once.removal)]
    each = gate_gradients(left, cases.batches("llama", batch_size=1), units)
    for one in units:
        first, gone = once.removal.units[one.reader.name], found.removal.units[one.reader.name]
        assert gone[first].all()
        assert int(gone.sum()) == 8
        scores = each[one.reader.name].square().sum(0)
        assert scores[gone & ~first].max() < scores[~gone].min()


def test_heads_go_before_the_portions_of_channels():
    """By default heads go by what the others make up for, all at once; gates of channels are measured without them."""
    model, batches = cases.build("llama"), cases.batches("llama")
    both = {"structure": {"ffn": 8, "kv_groups": 1}, "update": "none"}
    found = cases.prune(model, batches, **both, structure_rounds=2)
    assert found.report.passes == {"forward": 3.0, "backward": 2.0}  # the inputs of heads, and two probes
    heads = cases.prune(model, batches, structure={"kv_groups": 1}, update="none")
    left = cases.build("llama").double()
    for target in heads.targets:
        target.matrix(left).masked_fill_(heads.masks[target.name], 0)
    units = [one for name, one in units_that_stay(found.removal) if name == "ffn"]
    first = gate_gradients(left, cases.batches("llama", batch_size=1), units)
    for _, one in units_that_stay(heads.removal):
        assert torch.equal(found.removal.units[one.reader.name], heads.removal.units[one.reader.name])
    for one in units:
        lowest = first[one.reader.name].square().sum(0).argsort()[:4]
        assert found.removal.units[one.reader.name][lowest].all()


def test_there_are_no_more_rounds_than_channels_that_go():
    model, batches = cases.build("llama"), cases.batches("llama")
    options = {"structure": {"ffn": 3}, "update": "none", "structure_rounds": 999}
    found = cases.prune(model, batches, **options)
    assert found.report.passes == {"forward": 3.0, "backward": 3.0}
    assert expected_passes(GradProbeConfig(**options), 3).forward == 3


REFUSED = [
    ({"structure": {"kv_groups": 1}, "structure_rounds": 2}, "structure_rounds=2 has no effect here"),
    ({"structure": "auto", "params": 0.5, "importance": "obs", "structure_rounds": 0}, "structure_rounds must be"),
    ({"structure": {"ffn": 1}, "importance": "obs+fisher", "structure_rounds": 2}, "structure_rounds=2 has no effect"),
    ({"structure": {"experts": 1}, "structure_rounds": 0}, "structure_rounds must be"),
    ({"importance": "fisher"}, "importance='fisher' has no effect here: it belongs to structure={'ffn': ...}"),
    ({"importance": "fisher", "structure": {"blocks": 1}}, "importance='fisher' has no effect here"),
    ({"importance": "hessian", "structure": {"ffn": 0.3}}, "importance must be one of"),
    ({"importance": "random", "structure": {"ffn": 1}, "update": "none", "damping": 0.1}, "damping=0.1 has no effect"),
    ({"importance": "fisher", "structure": {"ffn": 1}, "accumulator_dtype": "int8"}, "has no effect here"),
    ({"structure": {"kv_groups": 1}, "checkpointing": True}, "checkpointing=True has no effect here"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_has_no_effect_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GradProbeConfig(**options)
