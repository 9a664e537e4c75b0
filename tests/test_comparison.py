"""Rows of a comparison against runs that share nothing, and what a user gets to see of them."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from gradprobe_hf import GradProbeConfig, compare_pretrained, prune_pretrained
from gradprobe_hf.cli import main
from gradprobe_hf.cli.output import print_comparison
from gradprobe_hf.comparison import rows
from gradprobe_hf.comparison.baselines import BASELINES, baselines, rows_of
from gradprobe_hf.comparison.rows import ComparedRow, Comparison
from gradprobe_hf.evaluation.divergence import Divergence
from gradprobe_hf.evaluation.perplexity import Measurement
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.plots import save_comparison
from gradprobe_hf.report.speed_figure import compared_shapes
from gradprobe_hf.run.probing import probe_pair, schedule
from gradprobe_hf.structures.unit_scores import UNIT_SCORES
from tests import cases
from tests.test_budgets import deep


def compared(model, config=None, configs=None, **options):
    text = {"calibration": cases.batches("llama"), "evaluation": cases.batches("llama", seed=9)}
    return compare_pretrained(model, config, configs, progress=False, **{**text, **options})


def alone(config, model=None):
    """The same, by a run of its own on a fresh model."""
    text = {"calibration": cases.batches("llama"), "evaluation": cases.batches("llama", seed=9), "progress": False}
    return prune_pretrained(model or cases.build("llama"), config, apply=False, **text).report


CONFIGS = {
    "random": cases.config(score="random"),
    "wanda": cases.config(score="wanda"),
    "sparsegpt": cases.config(update="sparsegpt"),
    "one probe": cases.config(probes=1),
    "threshold": cases.config(rule="threshold", gradient_threshold=0.5),
    "two probes": cases.config(),
    "two probes, token": cases.config(fisher="token"),
    "two probes, obs": cases.config(update="obs"),
    "two probes, admm": cases.config(update="admm"),
    "two probes, wanda": cases.config(score="wanda", probes=2),
    "rounds": cases.config(rounds=(0.3, 0.5)),
    "sequential": cases.config(order="sequential"),
    "2:4": cases.config(pattern="2:4"),
    "bounds": cases.config(max_matrix_sparsity=0.55),
    "sparser": cases.config(sparsity=0.7),
    "two probes again": cases.config(reduction_factor=0.1),
    "two probes, int8": cases.config(accumulator_dtype="int8"),
    "two probes, tight limit": cases.config(spike_limit=0.3),
}


def test_every_row_is_what_a_run_of_its_own_gives():
    model = cases.build("llama")
    before = cases.bits(model)
    found = compared(model, configs=CONFIGS)
    assert cases.changed(model, before) == []
    assert [row.method for row in found.rows] == list(CONFIGS)
    for row in found.rows:
        wanted = alone(CONFIGS[row.method])
        assert row.zeros == wanted.zeros, row.method
        assert row.loss == pytest.approx(wanted.evaluation["pruned"]["loss"], rel=1e-6), row.method
        assert row.passes == wanted.passes, row.method
    losses = {row.method: row.loss for row in found.rows}
    assert len({losses["two probes"], losses["two probes, int8"], losses["two probes, tight limit"]}) == 3
    assert found.dense.loss == pytest.approx(wanted.evaluation["dense"]["loss"], rel=1e-6)


def test_whole_structures_stand_beside_zeros():
    """Rows of any shape, each as its own run gives it, however many probes they could share."""
    configs = {
        "half": cases.config(probes=1),
        "half, by token": cases.config(probes=1, fisher="token"),
        "channels": GradProbeConfig(structure={"ffn": 8}, importance="fisher"),
        "blocks": GradProbeConfig(structure={"blocks": 1}, update="none"),
    }
    model = deep()
    before = cases.bits(model)
    found = compared(model, configs=configs)
    assert cases.changed(model, before) == []
    for row in found.rows:
        wanted = alone(configs[row.method], deep())
        assert row.loss == pytest.approx(wanted.evaluation["pruned"]["loss"], rel=1e-6), row.method
        assert row.passes == wanted.passes, row.method
        sizes = (wanted.structure or {}).get("parameters", {"after": wanted.model["parameters"]})
        assert (row.parameters, row.bytes) == (sizes["after"], 4 * sizes["after"]), row.method
        assert row.removed == (wanted.structure or {"removed": {}})["removed"]


def test_the_rows_of_a_structure_are_the_ways_to_choose_its_units():
    rows = baselines(
        GradProbeConfig(structure={"ffn": 8}, structure_rounds=2, importance="fisher", refinement="blocks")
    )
    assert list(rows) == [*UNIT_SCORES, "least squares"]
    assert {one.refinement for one in rows.values()} == {"none"}
    assert [one.importance for one in rows.values()] == [*UNIT_SCORES, None]
    assert [one.update for one in rows.values()] == ["none"] * len(UNIT_SCORES) + ["least_squares"]
    assert rows_of(GradProbeConfig(structure={"ffn": 8})).keys() == rows.keys()
    assert [*baselines(GradProbeConfig(structure={"blocks": 1}))] == ["cut", "least squares"]
    told = baselines(GradProbeConfig(structure={"ffn": 8}, damping=0.1))
    assert (told["obs"].damping, told["least squares"].damping) == (0.01, 0.1)


def test_what_reads_no_text_can_be_compared():
    configs = {name: cases.config(score=name) for name in ("magnitude", "random")}
    assert [row.passes["forward"] for row in compared(cases.build("llama"), configs=configs).rows] == [0, 0]


def test_nothing_is_measured_twice(monkeypatch):
    probes = []
    for module in (rows, probe_pair):
        real = module.run_probe

        def counted(work, one, real=real):
            probes.append(one.label)
            return real(work, one)

        monkeypatch.setattr(module, "run_probe", counted)
    names = ("one probe", "two probes", "two probes, obs", "sparser", "threshold")
    others = {"other obs": cases.config(update="obs", dense_target=0.0, damping=0.1)}
    compared(cases.build("llama"), configs={name: CONFIGS[name] for name in names} | others)
    assert probes == ["probe 0 (shared)", *["probe 1 (candidates shrunk)"] * 3]


def test_the_baselines_are_at_the_sparsity_and_pattern_of_the_run():
    config = cases.config(sparsity=0.31, max_metric_drop="5%", max_matrix_sparsity=0.9, update="obs", seed=3)
    for name, found in baselines(config).items():
        assert found.sparsity == 0.31
        assert found.seed == 3
        assert found.max_metric_drop is found.bounds is found.scope is None
        assert found.update == BASELINES[name].get("update", "none")
    assert {found.pattern for found in baselines(cases.config(pattern="2:4")).values()} == {"2:4"}
    assert {found.sparsity for found in baselines(cases.config(rounds=(0.2, 0.4))).values()} == {0.4}


@pytest.mark.parametrize("options", [{"sparsity": 0.31}, {"pattern": "2:4"}], ids=str)
def test_the_baselines_meet_one_budget(options, tmp_path):
    config = cases.config(**options)
    found = compared(cases.build("llama"), config)
    assert [row.method for row in found.rows] == list(BASELINES)
    targets = find_targets(cases.build("llama"))
    units = {"wanda": sum(target.shape[0] for target in targets), "one probe": 0, "two probes": 0}
    for row in found.rows:  # what is spent in every row (wanda) or matrix is rounded there
        exact = config.final_sparsity * sum(target.numel for target in targets)
        assert abs(row.zeros - exact) <= max(1, units.get(row.method, len(targets))) / 2, row.method
    found.save(tmp_path)
    assert json.loads((tmp_path / "comparison.json").read_text()) == found.to_dict()
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_a_baseline_that_cannot_be_is_left_out_and_named(caplog):
    config = cases.config(include=["lm_head", "q_proj"])
    with caplog.at_level(logging.WARNING):
        found = compared(cases.build("llama"), config)
    assert [row.method for row in found.rows] == ["magnitude", "wanda", "one probe", "two probes"]
    assert "sparsegpt is left out of the comparison: lm_head.weight" in caplog.text


def with_a_block_that_runs_twice():
    model = cases.build("llama")
    first, second = model.model.layers[:2]
    plain = second.forward
    second.forward = lambda hidden, **more: plain(first(hidden, **more), **more)
    return model


def test_a_baseline_that_turns_out_not_to_be_is_left_out_and_named(caplog):
    found = compared(with_a_block_that_runs_twice())
    assert [row.method for row in found.rows] == ["magnitude", "wanda", "one probe", "two probes"]
    assert "one probe + admm is left out of the comparison: model.layers.0 runs 2 times" in caplog.text


def test_a_comparison_of_nothing_is_an_error():
    seen = []

    def broken(model, batch):
        seen.append(batch)
        if len(seen) > 1:  # the first batch alone is run to see what it reaches
            raise ValueError("no such label")
        return summed_loss(model, batch)[0]

    texts = {"calibration": cases.batches("llama"), "evaluation": cases.batches("llama", seed=9), "progress": False}
    config = cases.config()
    only_probes = {name: one for name, one in baselines(config).items() if name.endswith("probes")}
    evaluated = []
    with pytest.raises(ValueError, match="in none of these ways"):
        compare_pretrained(
            cases.build("llama"),
            config,
            only_probes,
            **texts,
            loss_fn=lambda *a: broken(*a) if torch.is_grad_enabled() else (evaluated.append(1) or torch.tensor(1.0)),
        )
    assert evaluated, "the dense model was measured"


def test_blocks_that_cannot_be_reconstructed_are_found_before_any_probe():
    seen = []
    with pytest.raises(ValueError, match=r"model\.layers\.0 runs 2 times"):
        cases.prune(
            with_a_block_that_runs_twice(),
            cases.batches("llama"),
            preset="best",
            loss_fn=lambda *args: seen.append(1) or summed_loss(*args)[0],
        )
    assert len(seen) == 1, "to see what is reached"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"configs": {"other": cases.config(seed=1)}}, "'other' has seed=1 and the others 0"),
        ({"configs": {}}, "configs is empty"),
        ({"evaluation": False}, "needs an evaluation"),
        ({"configs": {"8": cases.config(pattern="3:16")}}, "not divisible by 16"),
    ],
)
def test_wrong_input_is_refused_before_any_pass(options, message, monkeypatch):
    monkeypatch.setattr(rows, "run_probe", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises(ValueError, match=message):
        compared(cases.build("llama"), **options)


def test_a_model_that_something_else_made_sparse_is_not_called_dense():
    model = cases.build("llama")
    assert compared(model, configs={"random": cases.config(score="random")}).original.column == "dense"
    for target in find_targets(model):
        target.matrix(model)[:, ::2] = 0
    found = compared(model, configs={"random": cases.config(score="random", sparsity=0.75)})
    assert (found.original.column, found.origin) == ("before", {"pruned_to": 0.5})


SMALL = ["--num-samples", "4", "--sequence-length", "16", "--evaluation-samples", "2", "--quiet"]


@pytest.mark.usefixtures("in_this_process")
def test_the_command_shows_the_speed_of_structures(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    line = ["compare", str(checkpoint), "--structure", "ffn=8", "--methods", "random,wanda", "--output", str(out)]
    assert main([*line, *SMALL, "--measure-speed"]) == 0
    said = capsys.readouterr().out
    for title in ("parameters", "MB", "first token, ms", "tokens/s"):
        assert title in said
    kept = json.loads((out / "comparison.json").read_text())
    assert [row["model"] for row in kept["speed"]["rows"]] == ["dense", "8 FFN channels of every block"]  # one shape
    assert kept["rows"][0]["parameters"] == kept["speed"]["rows"][1]["parameters"]
    assert (out / "speed.png").stat().st_size > 10_000
    assert main([*line, *SMALL, "--overwrite"]) == 0
    assert {path.name for path in out.iterdir()} == {"comparison.json", "comparison.png"}, "no speed of other rows"


def test_the_command(checkpoint, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("rounds: [0.3, 0.6]\n")
    command = ["compare", str(checkpoint), "--output", str(tmp_path / "out"), "--methods", "wanda,two probes", *SMALL]
    assert main([*command, "--sparsity", "0.6"]) == 0
    said = capsys.readouterr().out
    assert "two probes" in said
    assert "1.000" in said
    assert main([*command, "--json"]) == 1
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--also", str(recipe), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in printed["rows"]] == ["wanda", "two probes", "mine"]
    assert printed["configs"]["mine"]["rounds"] == [0.3, 0.6]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == printed
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    assert main([*command, "--overwrite", "--also", str(recipe), "--also", str(recipe)]) == 1
    assert "a row is called 'mine' already" in capsys.readouterr().err
    assert main(["compare", str(checkpoint), "--methods", "nothing", *SMALL]) == 1
    assert "no method is called 'nothing'" in capsys.readouterr().err


def test_a_row_of_infinite_perplexity_is_not_drawn(tmp_path):
    read = {"model": "dense", "tokens_per_second": None, "prefill_seconds": {"values": [1.0]}}
    speed = {"new_tokens": 2, "rows": [read]}
    rows = [{"method": str(value), "removed": {}, "sparsity": 0.5, "perplexity": value} for value in (30.0, None, 20.0)]
    dense = {"loss": 2.3, "perplexity": 10.0}
    assert [name for name, _, _ in compared_shapes(rows, dense, speed, "perplexity")] == ["dense", "20.0", "30.0"]
    assert len(save_comparison(rows, dense, "a text", tmp_path, speed)) == 2


def test_a_name_with_dollars_in_it_is_no_formula(tmp_path):
    r"""matplotlib would look for a command \none."""
    rows = [{"method": r"$\none$", "removed": {}, "sparsity": 0.5, "perplexity": 30.0}]
    made = save_comparison(rows, {"loss": 2.3, "perplexity": 10.0}, r"$\none$.txt", tmp_path)
    assert [path.name for path in made] == ["comparison.png"]


def test_no_number_of_a_table_is_cut(monkeypatch, capsys):
    """In a pipe or a log, which rich takes to be 80 characters wide, and where the metric has a long name."""
    passes = {"forward": 4.0, "backward": 1.0}
    apart = Divergence(kl=1.2345, top1_agreement=0.5, perplexity_ratio=2.0, perplexity_ratio_interval=None)
    row = ComparedRow("one probe + admm", 0.5, 5, 10, 9.4, 12345.6789, 1234.0, passes, 10, 40, {}, apart, 0.75)
    evaluation = {"metric": {"title": "word error rate", "dense": 0.5}, "source": "x", "protocol": "y"}
    for width in ("80", "40"):
        monkeypatch.setenv("COLUMNS", width)
        print_comparison([row], Measurement(9.0, 8103.1, 100), evaluation)
        said = capsys.readouterr().out
        assert "…" not in said
        for shown in ("one probe", "12,345.6789", "word error rate", "1.2345", "50.0%", "1,234", "4 + 1"):
            assert shown in said


def test_a_best_loss_of_nothing_has_no_ratio(capsys):
    """Of embeddings that have not moved."""
    passes = {"forward": 0.0, "backward": 0.0}
    rows = [
        ComparedRow(name, 0.5, 5, 10, loss, None, 1.0, passes, 10, 40, {}) for name, loss in (("a", 0.0), ("b", 0.1))
    ]
    print_comparison(rows, Measurement(0.0, None, 100), {"metric": None, "source": "x", "protocol": "y"})
    assert "0.0000" in capsys.readouterr().out


@pytest.mark.slow
def test_options_that_no_baseline_has_are_a_row_of_their_own(checkpoint, capsys):
    assert main(["compare", str(checkpoint), "--order", "sequential", "--json", *SMALL]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in printed["rows"]] == [*BASELINES, "as configured"]
    assert printed["configs"]["as configured"]["order"] == "sequential"
    assert main(["compare", str(checkpoint), "--preset", "best", "--json", *SMALL]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]] == [*BASELINES]


def test_rows_that_are_made_are_kept_when_a_later_one_fails(checkpoint, tmp_path, monkeypatch, capsys):
    real = Comparison.row

    def row(self, method, config):
        if method == "sparsegpt":
            raise OSError(28, "No space left on device")
        return real(self, method, config)

    monkeypatch.setattr(Comparison, "row", row)
    assert main(["compare", str(checkpoint), "--output", str(tmp_path / "out"), *SMALL]) == 1
    assert "No space left" in capsys.readouterr().err
    kept = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [one["method"] for one in kept["rows"]] == ["magnitude", "wanda"]


@pytest.mark.slow
def test_a_promise_is_kept_by_each_weight_update_by_itself(monkeypatch):
    """Configurations that differ in their weight update share masks, but not where the metric decides about them."""
    monkeypatch.setattr(schedule, "FINEST", 0.03)  # fewer attempts
    promise = {"max_metric_drop": "1%", "sparsity": 0.9, "sparsity_step": 0.3}
    configs = {how: cases.config(update=how, **promise) for how in ("none", "obs")}
    found = compared(cases.build("llama"), configs=configs)
    alone = {how: compared(cases.build("llama"), configs={how: config}).rows[0] for how, config in configs.items()}
    assert {row.method: row.zeros for row in found.rows} == {how: row.zeros for how, row in alone.items()}


def test_a_configuration_of_its_own_is_a_row_beside_the_baselines():
    """What was asked for is among what is compared, and what was asked for by default is there already."""
    own = cases.config(update="obs")
    assert rows_of(own) == {**baselines(own), "as configured": own}
    assert list(rows_of(GradProbeConfig())) == list(BASELINES)
