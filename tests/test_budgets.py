"""Budgets: which shapes meet one, which of them is chosen, and what is said of one that cannot be met."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.data.batches import Batches, from_iterable, row_count
from gradprobe_hf.model.files.saving import bytes_beside_parameters, save_in_shards
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run import decide
from gradprobe_hf.run.context import BlockOrder, RunContext
from gradprobe_hf.run.decide import conclude
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.shapes import block_order
from gradprobe_hf.run.shapes.budget import budget_shapes
from gradprobe_hf.structures.budgets import ShapeBudget
from gradprobe_hf.structures.importance import made_up_for
from gradprobe_hf.structures.plan import Plan
from tests import cases
from tests.smaller_models import MIXTURE, SIZES

BLOCKS = 4


def deep(name="llama"):
    """Four blocks, so that two can go."""
    torch.manual_seed(0)
    model = cases.build(name)
    model = type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": BLOCKS}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def built_parameters(model, going):
    """Of the smaller model, built."""
    config = model.config.to_dict()
    heads = config["num_attention_heads"] // config["num_key_value_heads"]
    left = config["num_key_value_heads"] - going.get("kv_groups", 0)
    smaller = type(model.config)(
        **{
            **config,
            "intermediate_size": config["intermediate_size"] - going.get("ffn", 0),
            "num_hidden_layers": BLOCKS - going.get("blocks", 0),
            "num_key_value_heads": left,
            "num_attention_heads": heads * left,
            "head_dim": config["hidden_size"] // config["num_attention_heads"],
        }
    )
    return type(model)(smaller).num_parameters()


def test_a_mixture_whose_first_block_has_no_experts_meets_the_budget():
    torch.manual_seed(0)
    sizes = {**SIZES, **MIXTURE, "num_experts": 16, "num_hidden_layers": 8, "mlp_only_layers": [0]}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes)).eval()
    for share in (0.7, 0.5):
        found = budget_shapes(model, find_targets(model), GradProbeConfig(structure="auto", params=share))
        assert any({"experts", "blocks"} <= one.going.keys() for one in found)
        assert max(one.parameters for one in found) <= share * model.num_parameters()


@pytest.mark.parametrize("share", [0.9, 0.75, 0.66])
def test_the_shapes_are_all_that_meet_the_budget_and_give_nothing_in_vain(share):
    model = deep()
    found = budget_shapes(model, find_targets(model), GradProbeConfig(structure="auto", params=share))
    limit = int(share * model.num_parameters())
    every = [
        dict(zip(("ffn", "kv_groups", "blocks"), counts, strict=True))
        for counts in itertools.product(range(0, 24, 2), range(2), range(BLOCKS - 1))
    ]
    allowed = [going for going in every if built_parameters(model, going) <= limit]
    best = [
        going
        for going in allowed
        if not any(other != going and all(other[name] <= going[name] for name in going) for other in allowed)
    ]
    wanted = {tuple(going.items()): built_parameters(model, going) for going in best}
    none = dict.fromkeys(("ffn", "kv_groups", "blocks"), 0)
    assert {tuple((none | one.going).items()): one.parameters for one in found} == wanted
    headers = {one.bytes - 4 * one.parameters for one in found}
    assert headers == {bytes_beside_parameters(model)}


@pytest.mark.parametrize("name", ["llama", "opt", "bert", "t5", "mixtral"])
def test_what_a_file_has_beside_parameters_is_known_before_it_is_written(name, tmp_path):
    """Never less: a budget of memory has to hold."""
    model = cases.build(name)
    save_in_shards(tmp_path, model)
    beside = (tmp_path / "model.safetensors").stat().st_size - sum(one.nbytes for one in model.parameters())
    assert beside <= bytes_beside_parameters(model) <= 1.1 * beside


@pytest.mark.parametrize("share", [*(pytest.param(one, marks=pytest.mark.slow) for one in (0.9, 0.7)), 0.8])
def test_a_file_is_no_larger_than_the_memory_that_was_asked_for(share, tmp_path):
    model = deep()
    save_in_shards(tmp_path / "dense", model)
    budget = int(share * (tmp_path / "dense" / "model.safetensors").stat().st_size)
    prune_pretrained(
        model,
        GradProbeConfig(structure="auto", memory=budget),
        calibration=cases.batches("llama"),
        evaluation=False,
        output_dir=tmp_path / "smaller",
        progress=False,
    )
    assert 0.8 * budget < (tmp_path / "smaller" / "model.safetensors").stat().st_size <= budget


def test_the_probes_of_experts_are_announced_with_the_other_passes(monkeypatch, caplog):
    monkeypatch.setattr("gradprobe_hf.run.shapes.search.TRIED", 1)
    caplog.set_level("INFO", "gradprobe_hf.run.shapes.estimates")
    config = GradProbeConfig(structure="auto", params=0.85)
    result = prune_pretrained(
        cases.build("mixtral"), config, calibration=cases.batches("mixtral", rows=8), evaluation=False, progress=False
    )
    assert any("experts" in one["removed"] for one in result.report.structure["candidates"])
    passes = result.report.passes
    (announced,) = re.findall(r"about (\d+) passes", caplog.text)
    assert int(announced) == pytest.approx(passes["forward"] + 2 * passes["backward"], rel=0.3)


def test_what_the_model_cannot_do_without_is_in_no_shape():
    model = deep("gpt2")
    shapes = budget_shapes(model, find_targets(model), GradProbeConfig(structure="auto", params=0.8))
    assert {name for one in shapes for name in one.going} == {"ffn", "blocks"}  # no heads


def test_an_encoder_and_a_decoder_meet_a_budget_by_their_channels(tmp_path):
    model = cases.build("t5")
    dense = sum(parameter.numel() for parameter in model.parameters())
    config = GradProbeConfig(structure="auto", params=0.9)
    batches = cases.batches("t5", rows=8)
    prune_pretrained(model, config, calibration=batches, evaluation=False, output_dir=tmp_path / "made", progress=False)
    smaller = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "made")
    left = sum(parameter.numel() for parameter in smaller.parameters())
    assert smaller.config.d_ff < model.config.d_ff
    assert left <= 0.9 * dense
    matrices = [module for name, module in smaller.named_modules() if name.endswith((".wi", ".wo"))]
    channel = sum(module.weight.numel() for module in matrices) / smaller.config.d_ff
    assert left + 2 * channel > 0.9 * dense, "widths of 24 channels change by 2"


def test_the_chosen_shape_is_the_one_that_lost_least_and_the_files_meet_the_budget(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("gradprobe_hf.run.shapes.search.TRIED", 2)
    caplog.set_level("INFO", "gradprobe_hf.run.shapes.estimates")
    model, batches = deep(), cases.batches("llama", rows=8)
    dense = cases.bits(model)
    config = GradProbeConfig(structure="auto", params=0.75)
    result = prune_pretrained(
        model,
        config,
        calibration=batches,
        evaluation=batches,
        apply=False,
        output_dir=tmp_path / "made",
        progress=False,
    )
    assert cases.changed(model, dense) == []
    found = result.report.structure
    tried = [one for one in found["candidates"] if one["loss"] is not None]
    assert len(tried) == 2 < len(found["candidates"])
    # What it takes was said in advance: a pass is one over all rows, and the search has seven eighths of them.
    (announced,) = re.findall(r"about (\d+) passes", caplog.text)
    passes = result.report.passes
    assert int(announced) == pytest.approx(passes["forward"] + 2 * passes["backward"], rel=0.25)
    assert f"{len(found['candidates'])} shapes meet params=0.75; 2 are pruned" in caplog.text
    assert min(tried, key=lambda one: one["loss"]) == found["candidates"][0]
    assert found["removed"] == found["candidates"][0]["removed"]
    # Those with the lowest estimates were tried.
    others = [one["estimated"] for one in found["candidates"] if one["loss"] is None]
    assert max(one["estimated"] for one in tried) <= min(others)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert loaded.num_parameters() == found["parameters"]["after"] <= 0.75 * model.num_parameters()
    # What was asked for is what is saved, and made again it is the same.
    saved = GradProbeConfig.from_pretrained(tmp_path / "made")
    assert (saved.structure, saved.params) == ("auto", 0.75)
    again = prune_pretrained(model, saved, calibration=batches, evaluation=False, apply=False, progress=False)
    assert again.report.structure["candidates"] == found["candidates"]
    assert cases.differing(again.masks, result.masks) == 0
    card = (tmp_path / "made" / "README.md").read_text()
    assert f"{len(found['candidates'])} shapes that meet it" in card
    assert "`params=0.75`" in card
    assert f"| {tried[1]['parameters']:,} | {tried[1]['loss']:.4f} |" in card


def test_a_run_that_was_killed_goes_on_with_the_shape_that_was_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.run.shapes.search.TRIED", 1)
    model, options = deep(), {"calibration": cases.batches("llama"), "evaluation": False, "apply": False}
    config = GradProbeConfig(structure="auto", params=0.8)
    whole = prune_pretrained(model, config, **options, progress=False)

    def killed(context, masks, diagnostics, snapshots=None):
        if snapshots is not None:
            raise KeyboardInterrupt
        return conclude(context, masks, diagnostics, snapshots)

    with monkeypatch.context() as patch:
        patch.setattr(decide, "conclude", killed)
        with pytest.raises(KeyboardInterrupt):
            prune_pretrained(model, config, **options, resume_dir=tmp_path / "state", progress=False)
    monkeypatch.setattr(decide, "choose_shape", lambda *_: pytest.fail("it was chosen before"))
    found = prune_pretrained(model, config, **options, resume_dir=tmp_path / "state", progress=False)
    assert found.report.structure == whole.report.structure
    assert all(torch.equal(found.new_weights[name], whole.new_weights[name]) for name in whole.new_weights)


@pytest.mark.slow
def test_a_model_on_disk_has_the_shape_of_one_in_memory(tmp_path):
    deep().save_pretrained(tmp_path / "dense")
    found = []
    for name, placed in (("memory", {}), ("disk", {"device_map": "disk", "offload_folder": tmp_path / "offload"})):
        result = prune_pretrained(
            tmp_path / "dense",
            GradProbeConfig(structure="auto", memory="50KB"),
            calibration=cases.batches("llama"),
            evaluation=False,
            output_dir=tmp_path / name,
            progress=False,
            **placed,
        )
        found.append((result.report.structure, AutoModelForCausalLM.from_pretrained(tmp_path / name)))
    (one, in_memory), (other, on_disk) = found
    assert one == other
    assert one["candidates"][0]["bytes"] <= 50_000
    for name in ("memory", "disk"):
        assert (tmp_path / name / "model.safetensors").stat().st_size <= one["candidates"][0]["bytes"]
    assert cases.changed(in_memory, cases.bits(on_disk)) == []


def test_an_estimate_is_the_loss_without_what_goes(monkeypatch):
    """Of a shape without some blocks and nothing else gone: that of a model without them."""
    monkeypatch.setattr("gradprobe_hf.run.shapes.search.TRIED", 1)
    model, batches = deep(), cases.batches("llama", rows=8)
    config = GradProbeConfig(structure="auto", params=0.9, importance="wanda", update="none")
    result = prune_pretrained(model, config, calibration=batches, evaluation=False, apply=False, progress=False)
    (shape,) = [one for one in result.report.structure["candidates"] if list(one["removed"]) == ["blocks"]]
    _, rest = from_iterable(batches, "batches").split(0, 1 / 8)
    layers, losses = model.model.layers, []
    for number in (1, 2):
        model.model.layers = torch.nn.ModuleList(layers[one] for one in range(BLOCKS) if one != number)
        sums = [summed_loss(model, batch) for batch in rest]
        losses.append(sum(float(loss.detach()) for loss, _ in sums) / sum(int(terms) for _, terms in sums))
    assert shape["estimated"] == pytest.approx(min(losses), rel=1e-5)


@pytest.fixture
def tried(monkeypatch):
    """What is left out, of seven blocks whose losses add up, two of which are tried after the first time."""
    cost, tried = {"a": 9, "b": 3, "c": 1, "d": 4, "e": 2, "f": 5, "g": 9}, []

    def losses_without(_context, _plan, gone, blocks, _diagnostics):
        tried.extend(gone | {block} for block in blocks)
        return {block: sum(cost[one] for one in gone | {block}) for block in blocks}

    monkeypatch.setattr(block_order, "losses_without", losses_without)
    monkeypatch.setattr(block_order, "FEWER_BLOCKS", 2)
    return tried


def test_later_blocks_are_looked_for_among_the_best_of_the_time_before(tried):
    context, plan = SimpleNamespace(block_order=BlockOrder(), progress=False), Plan(tuple("abcdefg"), {})
    found = block_order.blocks_going(context, plan, 3, None)
    assert [(one["block"], one["loss"]) for one in found] == [("c", 1), ("e", 3), ("b", 6)]
    assert tried[:5] == [{block} for block in "bcdef"]
    assert tried[5:] == [{"c", "e"}, {"c", "b"}, {"c", "e", "b"}, {"c", "e", "d"}]
    assert block_order.blocks_going(context, plan, 2, None) == found[:2]
    assert len(tried) == 9  # what is known is not measured again


def test_one_block_of_each_kind_stays(tried):
    context, plan = (
        SimpleNamespace(block_order=BlockOrder(), progress=False),
        Plan(tuple("abcdefg"), {}, kinds=tuple("xxyxxxx")),
    )
    assert plan.blocks_kept == 3
    assert plan.may_go(set()) == ["b", "d", "e", "f"]
    assert [one["block"] for one in block_order.blocks_going(context, plan, 3, None)] == ["e", "b", "d"]
    assert plan.first_to_go("cbde", 3) == ["b", "d", "e"]
    assert not any("c" in gone for gone in tried)
    two = Plan(tuple("abcdefg"), {}, kinds=tuple("xyyxxxx"))
    assert (two.may_go({"b"}), two.may_go({"c"})) == (["d", "e", "f"], ["d", "e", "f"])
    assert two.may_go(set()) == ["b", "c", "d", "e", "f"]
    assert Plan(tuple("abc"), {}, kinds=tuple("xyz")).blocks_kept == 3


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("gone", [set(), {2}])
def test_the_losses_without_each_block_are_those_of_whole_passes(gone, is_cached, monkeypatch):
    model = deep()
    batches = cases.batches("llama", rows=8)
    found = from_iterable(batches, "batches")
    context = RunContext(model, None, find_targets(model), GradProbeConfig(), found, Batches.none(), progress=False)
    plan = Plan.of(model, context.targets, {"blocks": 1})
    names, diagnostics = [f"model.layers.{number}" for number in range(BLOCKS)], Diagnostics()
    tried = [name for number, name in enumerate(names) if number not in gone]
    before = {names[number] for number in gone}
    if not is_cached:  # as where a block runs twice
        monkeypatch.setattr(block_order, "blocks_in_order", Mock(side_effect=ValueError))
    found = block_order.losses_without(context, plan, before, tried[::-1], diagnostics)
    assert set(found) == set(tried)
    layers = model.model.layers
    for name in tried:
        model.model.layers = torch.nn.ModuleList(
            layer for layer, own in zip(layers, names, strict=True) if own not in {*before, name}
        )
        sums = [summed_loss(model, batch) for batch in batches]
        whole = sum(float(loss.detach()) for loss, _ in sums) / sum(int(terms) for _, terms in sums)
        assert found[name] == pytest.approx(whole, rel=1e-5)
    # Each begins in front of the block that is left out.
    skipped = [names.index(name) / BLOCKS if is_cached else 0 for name in tried]
    assert diagnostics.passes["forward"] == pytest.approx(sum(1 - share for share in skipped))


def test_few_rows_are_enough_tokens_that_have_a_loss():
    model = deep()

    def rows_of(labels, batch_size=1):
        rows = [{"input_ids": torch.ones(1, 512, dtype=torch.long), "labels": labels} for _ in range(64)]
        read = from_iterable(rows, "batches").in_batches_of(batch_size)
        found = block_order.few_rows(
            RunContext(model, None, find_targets(model), GradProbeConfig(), read, Batches.none(), progress=False)
        )
        assert max(map(row_count, found)) <= batch_size
        return sum(map(row_count, found))

    labels = torch.ones(1, 512, dtype=torch.long)
    assert rows_of(labels) == 9  # of 511 predicted tokens each
    assert all(rows_of(labels, batch_size) == 9 for batch_size in (3, 4, 64))
    assert rows_of(labels.masked_fill(torch.arange(512) < 256, -100)) == 16
    assert rows_of(labels.masked_fill(torch.arange(512) < 500, -100)) == 32  # few answers in long chats


def test_what_makes_up_for_columns_is_least_squares():
    torch.manual_seed(0)
    x, weight = torch.randn(50, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    gone = torch.tensor([True, False, False, True, False, True, False, False])
    best = torch.linalg.lstsq(x[:, ~gone], x @ weight.T).solution.T
    found = made_up_for(weight, torch.linalg.inv(x.T @ x), gone)
    torch.testing.assert_close(found[:, ~gone], best)
    assert not found[:, gone].any()


REFUSED = [
    ({"structure": "auto"}, "structure='auto' needs one budget"),
    ({"structure": "auto", "params": 0.5, "memory": "1MB"}, "got params=0.5 and memory='1MB'"),
    ({"structure": "auto", "params": -0.5}, "params must be a share"),
    ({"structure": "auto", "params": 1.5}, "params must be a share"),
    ({"structure": "auto", "params": "many"}, "params must be a share"),
    ({"structure": "auto", "memory": 0.5}, "memory must be a number of bytes"),
    ({"structure": "auto", "params": 0.5, "sparsity": 0.5}, "cannot be combined with sparsity=0.5"),
    ({"structure": {"ffn": 0.3}, "params": 0.5}, "cannot be combined with params=0.5"),
    ({"params": 0.5}, "params=0.5 has no effect here: it belongs to structure='auto'"),
    ({"structure": "some", "params": 0.5}, "or 'auto' beside a budget"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_a_budget_that_is_wrong_by_itself_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GradProbeConfig(**options)


def test_a_budget_that_the_model_cannot_meet_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.run.request.reading.load_batches", lambda *_, **__: pytest.fail("text was read"))
    model = deep()
    count = model.num_parameters()
    for given, message in (
        ({"params": "1M"}, f"params='1M' is no budget: the model has {count:,} parameters as it is"),
        ({"params": 100}, "params=100 (100 parameters) is less than any shape of LlamaForCausalLM has; the nearest"),
        ({"memory": 400}, "structure={'ffn': 22, 'kv_groups': 1, 'blocks': 2} with "),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            prune_pretrained(
                model, GradProbeConfig(structure="auto", **given), calibration=cases.batches("llama"), progress=False
            )
        assert str(refused.value).count("structure={") == (0 if "no budget" in message else 2)  # the nearest two


def test_the_nearest_shares_that_are_named_can_be_given():
    """A share is told what it might have been, and the shape that stands beside it is what comes of that."""
    model, options = deep(), {"calibration": cases.batches("llama"), "evaluation": False, "progress": False}
    with pytest.raises(ValueError, match="less than any shape") as refused:
        prune_pretrained(model, GradProbeConfig(structure="auto", params=0.01), **options)
    named = re.findall(r"structure=(\{.*?\}) with [\d,]+ parameters \(params=([\d.]+)\)", str(refused.value))
    assert len(named) == 2
    going, share = named[0]
    found = prune_pretrained(model, GradProbeConfig(structure="auto", params=float(share)), **options)
    assert str(dict(found.report.structure["removed"])) == going


def test_a_share_that_no_shape_of_an_encoder_meets_is_refused():
    bert = cases.build("bert")
    with pytest.raises(ValueError, match="is less than any shape of Bert"):
        prune_pretrained(bert, GradProbeConfig(structure="auto", params=0.01), calibration=cases.batches("bert"))


def test_rounds_that_the_model_has_no_use_for_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.pruning.open_run", lambda *_, **__: pytest.fail("work began"))
    options = {"structure": "auto", "params": 0.8, "importance": "obs", "structure_rounds": 2}
    with pytest.raises(ValueError, match=r"structure_rounds=2 has no effect here: .* LlamaForCausalLM has none"):
        cases.prune(cases.build("llama"), cases.batches("llama"), **options)
    with pytest.raises(BaseException, match="work began"):
        cases.prune(cases.build("mixtral"), cases.batches("mixtral"), **options)


def test_budgets_are_read_as_they_are_written():
    assert ShapeBudget.of(params="0.75").share == 0.75
    assert ShapeBudget.of(params="1.2B").limit == 1_200_000_000
    assert ShapeBudget.of(params="0.267B").limit == 267_000_000
    assert ShapeBudget.of(params="1.001M").limit == 1_001_000
    assert ShapeBudget.of(memory="1.7MiB").limit == 1_782_579
    assert ShapeBudget.of(params=5000).limit == 5000
    assert ShapeBudget.of(memory="1.5 GB").limit == 1_500_000_000


def test_the_command_line_takes_a_budget(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.run.shapes.search.TRIED", 1)
    deep().save_pretrained(tmp_path / "dense")
    cases.tokenizer().save_pretrained(tmp_path / "dense")
    line = [str(tmp_path / "dense"), "--structure", "auto", "--params", "0.8"]
    assert main(["estimate", *line]) == 1
    assert "Estimate one of them" in capsys.readouterr().err
    options = ["--calibration", "pydoc", "--num-samples", "4", "--sequence-length", "16", "--evaluation-samples", "2"]
    assert main(["prune", *line, "--output", str(tmp_path / "made"), *options]) == 0
    said = capsys.readouterr().out
    assert "shapes meet params=0.8" in said
    assert json.loads((tmp_path / "made" / "config.json").read_text())["gradprobe"]["structure"]
