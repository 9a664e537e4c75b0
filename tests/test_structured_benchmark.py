"""The benchmark of smaller models: its rivals' scores against restatements, and what its rows have in common."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import elsewhere, quality_worker, structured_quality
from benchmarks.structured_rows import ROWS, block_influence, flap_scores, gisp_scores
from benchmarks.structured_table import structured_table
from gradprobe_hf.data import windows
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.structures.plan import Plan
from tests import cases


@pytest.fixture(scope="module")
def context():
    """As much of a run as the scores read."""
    model = cases.build("llama", dtype=torch.float64)
    return SimpleNamespace(model=model, calibration=cases.batches("llama"))


@pytest.fixture(scope="module")
def plan(context):
    return Plan.of(context.model, find_targets(context.model), {"ffn": 1})


def feed_forward(model, block):
    return model.get_submodule(f"{block}.mlp")


def test_flap_is_the_variance_of_a_channel_times_its_squared_weights(context, plan):
    found = flap_scores(context, plan)
    seen = {block: [] for block in plan.blocks}
    for block in plan.blocks:
        mlp = feed_forward(context.model, block)
        plain = mlp.down_proj.forward
        mlp.down_proj.forward = lambda x, block=block, plain=plain: seen[block].append(x.detach()) or plain(x)
    try:
        for batch in context.calibration:
            context.model(**batch)
    finally:
        for block in plan.blocks:
            del feed_forward(context.model, block).down_proj.forward
    for block in plan.blocks:
        inputs = torch.cat(seen[block]).flatten(0, 1)
        weight = feed_forward(context.model, block).down_proj.weight.detach()
        assert found[block].shape == (weight.shape[1],)
        for channel, score in enumerate(found[block]):
            column = weight[:, channel]
            known = float(inputs[:, channel].var() * (column @ column))
            assert float(score) == pytest.approx(known, rel=1e-9)


def test_gisp_sums_weights_times_gradients_over_a_channel(context, plan):
    found = gisp_scores(context, plan)
    model = context.model
    assert not any(parameter.requires_grad for parameter in model.parameters()), "as it was"
    for block in plan.blocks:
        mlp = feed_forward(model, block)
        weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
        for weight in weights:
            weight.requires_grad_(True)
        # The loss is a sum over tokens: HF's mean, of float32, times how many there are.
        loss = sum(
            model(**batch, labels=batch["input_ids"]).loss * batch["input_ids"][:, 1:].numel()
            for batch in context.calibration
        )
        gate, up, down = (
            (w * g).detach().abs() for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True)
        )
        for weight in weights:
            weight.requires_grad_(False)
        assert found[block].tolist() == pytest.approx(
            (gate.sum(1) + up.sum(1) + down.sum(0)).tolist(), rel=1e-6
        )  # losses are of float32


def test_a_block_that_turns_its_input_little_goes_first(context, plan):
    found = block_influence(context, plan)
    sums = dict.fromkeys(plan.blocks, 0.0)
    for batch in context.calibration:
        hidden = context.model(**batch, output_hidden_states=True).hidden_states
        for number, block in enumerate(list(plan.blocks)[:-1]):  # the last has the norm behind it
            for before, after in zip(hidden[number].flatten(0, 1), hidden[number + 1].flatten(0, 1), strict=True):
                sums[block] += 1 - float(before @ after / (before.norm() * after.norm()))
    for block in list(plan.blocks)[:-1]:
        assert found[block] == pytest.approx(sums[block], rel=1e-5)


METHODS = (
    "channels, Fisher + least squares",
    "channels, Wanda-sp",
    "blocks, ShortGPT's influence",
    "channels, Wanda-sp, half own text",
    "blocks, ShortGPT's influence, half own text",
    "channels, Wanda-sp, recovered",
)


@pytest.fixture
def bench(checkpoint, text_file, other_text_file, tmp_path, monkeypatch):
    """Runs the benchmark's command line, its cells in this process; returns what is in its file."""
    output = tmp_path / "structured_quality.json"
    monkeypatch.setattr(quality_worker, "alone", lambda function, *args: function(*args))
    monkeypatch.setattr(quality_worker, "Bench", cache(quality_worker.Bench))
    monkeypatch.setattr(structured_quality, "code_commit", lambda *_: "abc")
    monkeypatch.setattr(structured_quality, "NEAR", 0.05)  # a channel of a tiny model is a percent of it

    def run(*more: str):
        words = ["--model", checkpoint, "--calibration", f"{text_file}[:70%]", "--evaluation", other_text_file]
        words += ["--num-samples", 4, "--sequence-length", 16, "--evaluation-samples", 4, "--batch-size", 2]
        words += ["--output", output, "--columns", "0.33", "--recovery-steps", 2, *more]
        monkeypatch.setattr(sys, "argv", ["structured_quality.py", *map(str, words)])
        structured_quality.main()
        return {**json.loads(output.read_text()), "made_by": "structured_smollm2"}

    return run


def test_rows_have_as_many_parameters_and_the_model_writes_once(bench, monkeypatch):
    written = []
    plain = windows.own_text
    monkeypatch.setattr(windows, "own_text", lambda *args, **options: written.append(1) or plain(*args, **options))
    found = bench("--methods", *METHODS)
    assert [row["method"] for row in found["rows"]] == [name for name in ROWS if name in METHODS]
    zeros = [row["zeros"] for row in found["rows"]]
    assert max(zeros) - min(zeros) < 0.05 * found["rows"][0]["weights"]
    assert len(written) == 1
    texts = {row["method"]: row["calibration"] for row in found["rows"]}
    own = {text for method, text in texts.items() if "half own text" in method}
    others = {text for method, text in texts.items() if "half own text" not in method}
    assert (len(own), len(others)) == (1, 1)
    assert own != others
    by_method = {row["method"]: row for row in found["rows"]}
    assert by_method["channels, Wanda-sp, recovered"]["options"]["recovery_steps"] == 2
    assert by_method["channels, Wanda-sp, recovered"]["zeros"] == by_method["channels, Wanda-sp"]["zeros"]
    shown = structured_table(found)
    assert "Half own text: every second calibration window is of text that the model writes." in shown
    assert "Recovered: trained for 2 steps" in shown


def test_a_trained_row_has_the_learning_rate_with_the_least_held_out_divergence(bench, monkeypatch):
    trained = {}
    plain = structured_quality.recover_pretrained

    def kept(model, teacher, config, **options):
        trained[f"{config.learning_rate:g}"] = plain(model, teacher, config, **options)
        return trained[f"{config.learning_rate:g}"]

    monkeypatch.setattr(structured_quality, "recover_pretrained", kept)
    measured = []
    pair = structured_quality.measure_pair
    monkeypatch.setattr(
        structured_quality, "measure_pair", lambda a, b, **more: measured.append(b.model) or pair(a, b, **more)
    )
    rates = ["0.03", "0.0001", "0.01"]  # the largest first: neither the first nor the last should win by its place
    row = bench("--methods", METHODS[5], "--recovery-rates", *rates)["rows"][0]
    least = {rate: min(made.report.recovery["held_out"].values()) for rate, made in trained.items()}
    assert list(least) == rates
    assert row["options"]["held_out_kl"] == pytest.approx(least, abs=1e-4)
    assert measured == [trained[min(least, key=least.get)].model]


def test_a_cell_that_is_there_is_not_made_again(bench, monkeypatch):
    first = bench("--methods", METHODS[1])
    made = []
    plain = structured_quality.make_cell
    monkeypatch.setattr(structured_quality, "make_cell", lambda task: made.append(task.method) or plain(task))
    found = bench("--methods", *METHODS[:2])
    assert made == [METHODS[0]]
    assert first["rows"][0] in found["rows"]


@pytest.mark.slow
def test_what_runs_elsewhere_is_beside_what_transformers_writes(tmp_path, monkeypatch):
    """With this environment in place of one of its own."""
    model = cases.build("llama")
    model.save_pretrained(tmp_path / "made")
    ids = [5, 7, 11]
    tokens = elsewhere.wanted(tmp_path / "made", ids)
    plain = model.generate(torch.tensor([ids]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert tokens == plain[0, 3:].tolist()
    monkeypatch.setattr(elsewhere, "environment", lambda *_: Path(sys.executable))
    given, runtime = {"ids": ids, "new": elsewhere.NEW}, elsewhere.RUNTIMES["transformers"]
    found = elsewhere.run(Path(sys.executable), runtime, tmp_path / "made", given)
    assert elsewhere.verdict(found, tokens, "") == "same"
    assert elsewhere.verdict(found, tokens[::-1], "") == "another text"
    assert elsewhere.verdict({"text": " a b", "how": "slowly"}, [], "a b") == "slowly: same"
    lost = elsewhere.run(Path(sys.executable), runtime, tmp_path / "nowhere", given)
    assert elsewhere.verdict(lost, tokens, "").startswith("no: ")
