"""A method is a value: one row in a table, and everything knows it without another line."""

from __future__ import annotations

import json

import pytest
import torch

from gradprobe_hf import GradProbeConfig, compare_pretrained, prune_pretrained
from gradprobe_hf.cli import main
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.sizes import accumulator_bytes
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.scores.fisher import estimated_fisher
from gradprobe_hf.scores.table import SCORES, Score
from gradprobe_hf.scores.terms import MATRIX_TERMS, MatrixTerm, matrix_terms
from gradprobe_hf.updates.problem import Solution
from gradprobe_hf.updates.table import UPDATES, WeightUpdate
from tests import cases
from tests.reference.naive import sequence_loss


def fourth_power(evidence):
    """`W^4 F`: no published score."""
    fisher = estimated_fisher(evidence.statistics, evidence.fisher, evidence.rows)
    return evidence.weight.square().square() * fisher


def largest_move(evidence):
    """`|W| sqrt(sum_s g_s^4)`, of a statistic that is no published one either."""
    quartic = evidence.statistics.read("quartic", evidence.rows)
    return evidence.weight.abs() * quartic.sqrt()


def doubled(problem, mask):
    """Kept weights twice as large: easy to see, and of no other use."""
    return Solution((2 * problem.weight).masked_fill(mask, 0), mask, problem.damping)


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    score = Score(
        function=fourth_power,
        measured="gradients",
        uses_fisher=True,
        scope="tensor",
        sentence="Each weight was scored by its fourth power times {fisher}.",
        refuses={"rounds": "a toy decides once"},
        source="this test",
    )
    update = WeightUpdate(
        function=doubled,
        dense_target=0.0,
        products=7,
        workspace=3,
        sentence="Then the kept weights were doubled.",
        refuses={"pattern": "a toy knows no groups"},
        source="this test",
    )
    of_own_term = Score(
        function=largest_move,
        measured="gradients",
        terms=("quartic",),
        scope="tensor",
        sentence="Each weight was scored by a statistic of this test.",
        source="this test",
    )
    monkeypatch.setitem(MATRIX_TERMS, "quartic", MatrixTerm(lambda sums, g: sums.add_(g.square().square())))
    monkeypatch.setitem(SCORES, "of its own term", of_own_term)
    monkeypatch.setitem(SCORES, "toy", score)
    monkeypatch.setitem(UPDATES, "doubled", update)


SMALL = {"num_samples": 4, "sequence_length": 8, "batch_size": 2, "evaluation_samples": 2}


def toy(**more):
    return GradProbeConfig(score="toy", probes=1, update="doubled", **SMALL, **more)


def test_it_prunes_as_its_functions_say():
    dense, model = cases.build("llama"), cases.build("llama")
    batches = cases.batches("llama")
    result = prune_pretrained(model, toy(), calibration=batches, progress=False)
    fisher = prune_pretrained(cases.build("llama"), GradProbeConfig(probes=1), calibration=batches, progress=False)
    assert any(not torch.equal(result.masks[name], fisher.masks[name]) for name in result.masks)
    for target in result.targets:
        mask = result.masks[target.name]
        assert int(mask.sum()) == round(0.5 * target.numel)  # the row's scope: a matrix
        assert torch.equal(target.matrix(model), (2 * target.matrix(dense)).masked_fill(mask, 0))
    assert result.report.passes == {"forward": 3.0, "backward": 1.0}  # one probe, and two of reconstruction


def test_a_term_is_measured_and_priced_from_its_row(tmp_path):
    model, rows = cases.build("llama", torch.float64), cases.batches("llama", rows=4, batch_size=1)
    targets = find_targets(model)
    quartic = {target.name: torch.zeros(target.shape, dtype=torch.float64) for target in targets}
    for row in rows:
        model.zero_grad()
        sequence_loss(model, row).backward()
        for target in targets:
            quartic[target.name] += model.get_parameter(target.parameter).grad ** 4
    wanted = {}
    for target in targets:
        score = (target.matrix(model).abs() * quartic[target.name].sqrt()).flatten()
        lowest = score.argsort()[: round(0.5 * target.numel)]
        wanted[target.name] = torch.zeros(target.numel, dtype=torch.bool).index_fill_(0, lowest, True)
    config = GradProbeConfig(score="of its own term", probes=1, update="none", **SMALL)
    for more in ({}, {"resume_dir": tmp_path / "state"}):
        built = cases.build("llama", torch.float64)
        result = prune_pretrained(built, config, calibration=cases.batches("llama", rows=4), progress=False, **more)
        for name, mask in result.masks.items():
            assert torch.equal(mask.flatten(), wanted[name]), name

    weights = sum(target.numel for target in targets)
    assert accumulator_bytes(config, weights) == 4 * weights
    assert accumulator_bytes(config.varied(accumulator_dtype="bfloat16"), weights) == 2 * weights


def test_a_term_that_no_row_has_is_named_with_those_there_are():
    with pytest.raises(KeyError, match="no probe measures cubic: there are sequence, token, peak, quartic, marginals"):
        matrix_terms({"sequence", "cubic"})


def test_the_configuration_validates_from_the_rows():
    assert GradProbeConfig(score="toy").probes == 2
    with pytest.raises(ValueError, match=r"score='toy'.*rounds=.*a toy decides once"):
        GradProbeConfig(score="toy", rounds=(0.2, 0.5))
    with pytest.raises(ValueError, match=r"update='doubled'.*pattern='2:4'.*a toy knows no groups"):
        GradProbeConfig(update="doubled", pattern="2:4")
    with pytest.raises(ValueError, match="'toy'"):
        GradProbeConfig(score="no such score")


def test_the_estimate_prices_from_the_rows():
    model = cases.build("llama").to("meta")
    targets = find_targets(model)
    priced, plain = (
        estimate(model, targets, GradProbeConfig(probes=1, update=update, dense_target=0.0, **SMALL), base=0)
        for update in ("doubled", "obs")
    )
    product = sum(2 * target.numel * target.shape[1] for target in targets)
    assert priced.work["resident"].flops - plain.work["resident"].flops == 7 * product
    solved = [item for stage in priced.placements[0].stages for item in stage.items if "least squares" in item.label]
    assert max(item.bytes for item in solved) == 3 * 4 * max(target.numel for target in targets)


def test_the_command_line_the_card_and_the_comparison_know_it(checkpoint, text_file, tmp_path, capsys):
    data = ["--calibration", str(text_file), "--num-samples", "4", "--sequence-length", "8", "--quiet", "--json"]
    method = ["--score", "toy", "--probes", "1", "--update", "doubled"]
    assert main(["prune", str(checkpoint), "--output", str(tmp_path / "out"), *method, *data]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["score"] == "toy"
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "scored by its fourth power times the geometric mean" in card
    assert "Then the kept weights were doubled." in card

    assert main(["estimate", str(checkpoint), *method, *data[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["target_weights"] > 0

    more = ["--evaluation", str(text_file), "--evaluation-samples", "2", "--methods", "magnitude,as configured"]
    assert main(["compare", str(checkpoint), *method, *data, *more]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["magnitude", "as configured"]


def test_it_shares_a_comparison_with_others(text_file, checkpoint):
    configs = {
        "toy": toy().varied(update="none"),
        "toy, doubled": toy(),
        "one probe": GradProbeConfig(probes=1, **SMALL),
    }
    found = compare_pretrained(
        checkpoint, toy(), configs, calibration=str(text_file), evaluation=str(text_file), progress=False
    )
    alone, updated, fisher = found.rows
    assert alone.zeros == updated.zeros
    assert alone.loss != updated.loss != fisher.loss
