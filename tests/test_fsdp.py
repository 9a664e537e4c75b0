"""A model that FSDP2 shards over two real processes ends as the whole model in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from gradprobe_hf import compare_pretrained, prune_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.evaluation import divergence
from gradprobe_hf.model.fsdp import check_sharding, is_sharded
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.probing import pair_masks, probe_pair
from tests import cases
from tests.grids import some
from tests.launch import together
from tests.test_offload import tensors_in
from tests.test_processes import assert_close_divergence

pytestmark = pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 is refused on this torch")


def sharded(name, dtype=torch.float64):
    """Every block and the rest, over all processes."""
    model = cases.build(name, dtype)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole_state(model):
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for key, value in model.state_dict().items()
    }


def outcome(model, name, options, rows, output=None, **more):
    result = prune_pretrained(
        model,
        cases.config(**options),
        calibration=cases.batches(name, rows=rows, batch_size=1),
        evaluation=cases.batches(name, rows=3, batch_size=1, seed=7),
        output_dir=output,
        progress=False,
        **more,
    )
    return {
        "report": (result.report.zeros, result.report.probes, result.report.evaluation),
        "state": whole_state(model),
        "masks": sum(mask.numel() for mask in result.masks.values()),
        "accumulators": result.report.memory["accumulator_bytes"],
        "gradients": all(parameter.requires_grad for parameter in model.parameters()),
        "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


def in_shards(name, options, rows, output=None):
    return outcome(sharded(name), name, options, rows, output)


CASES = {
    "path": ("llama", {"sparsity": 0.5}, 6),
    "uneven": ("llama", {"sparsity": 0.5}, 5),
    "recomputed": ("llama", {"sparsity": 0.5, "checkpointing": True}, 5),
    "tied, embeddings": ("tied", {"sparsity": 0.5, "include": ["embed_tokens", "*_proj"], "fisher": "token"}, 4),
    "conv1d": ("gpt2", {"sparsity": 0.37}, 4),
    "threshold": ("llama", {"sparsity": 0.6, "rule": "threshold", "gradient_threshold": 0.3}, 4),
    "wanda rows": ("llama", {"sparsity": 0.5, "score": "wanda"}, 4),
    "random": ("gpt2", {"sparsity": 0.5, "score": "random"}, 4),
    "2:4": ("llama", {"pattern": "2:4", "update": "none"}, 4),
    "magnitude by block": ("opt", {"sparsity": 0.5, "score": "magnitude", "scope": "block"}, 4),
}


@some("case", CASES, fast=("uneven", "tied, embeddings", "2:4"))
def test_shards_end_as_the_whole_model(case):
    name, options, rows = CASES[case]
    wanted = outcome(cases.build(name, torch.float64), name, options, rows)
    first, second = together(in_shards, name, options, rows)
    for one in (first, second):
        assert one["report"][0] == wanted["report"][0]
        assert one["report"][1] == pytest.approx(wanted["report"][1], rel=1e-9)
        for state in ("dense", "pruned") if options.get("score") != "random" else ():
            loss = wanted["report"][2][state]["loss"]
            assert one["report"][2][state]["loss"] == pytest.approx(loss, rel=1e-9)
        if options.get("score") != "random":
            assert_close_divergence(one["report"][2]["divergence"], wanted["report"][2]["divergence"])
        for key, value in wanted["state"].items():
            assert torch.equal(one["state"][key], value), key
        assert one["gradients"]
        assert one["sharded"]
    # nothing is whole anywhere: masks and accumulators are dealt like the weights
    assert first["masks"] + second["masks"] == wanted["masks"]
    assert first["accumulators"] + second["accumulators"] == wanted["accumulators"]
    assert 0 < first["masks"] < wanted["masks"]


UPDATED = {
    "admm": ("llama", {"sparsity": 0.5, "probes": 1, "update": "admm"}, 5),
    "sparsegpt, conv1d": ("gpt2", {"sparsity": 0.5, "update": "sparsegpt"}, 4),
    "obs, 2:4": ("llama", {"pattern": "2:4", "score": "wanda", "update": "obs"}, 4),
    "admm, conv1d": ("gpt2", {"sparsity": 0.5, "probes": 1, "update": "admm"}, 3),
}


@some("case", UPDATED, fast=("admm", "sparsegpt, conv1d"))
def test_kept_weights_of_shards_are_updated_as_those_of_the_whole_model(case):
    name, options, rows = UPDATED[case]
    wanted = outcome(cases.build(name, torch.float64), name, options, rows)
    first, second = together(in_shards, name, options, rows)
    for one in (first, second):
        assert one["report"][0] == wanted["report"][0]
        loss = wanted["report"][2]["pruned"]["loss"]
        assert one["report"][2]["pruned"]["loss"] == pytest.approx(loss, rel=1e-7)
        for key, value in wanted["state"].items():
            assert torch.equal(one["state"][key] == 0, value == 0), key
            torch.testing.assert_close(one["state"][key], value, rtol=1e-5, atol=1e-7, msg=key)
        assert one["sharded"]
    assert first["masks"] + second["masks"] == wanted["masks"]
    assert 0 < first["masks"] < wanted["masks"]


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "tied"])
def test_the_saved_checkpoint_is_that_of_one_process(name, tmp_path):
    outcome(cases.build(name, torch.float64), name, {"sparsity": 0.5}, 4, tmp_path / "one")
    together(in_shards, name, {"sparsity": 0.5}, 4, tmp_path / "two")
    first, second = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "two")
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert inspect_checkpoint(tmp_path / "two").zeros == inspect_checkpoint(tmp_path / "one").zeros
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "two")).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "two" / "README.md").read_text().count("FSDP")


def from_distributed_config(folder, output):
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    assert is_sharded(model)
    return outcome(model, "llama", {"sparsity": 0.5}, 4, output)


def test_a_model_that_transformers_shards(tmp_path):
    cases.build("llama", torch.float64).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    wanted = outcome(model, "llama", {"sparsity": 0.5}, 4, tmp_path / "one")
    for one in together(from_distributed_config, tmp_path / "model", tmp_path / "two"):
        assert all(torch.equal(one["state"][key], value) for key, value in wanted["state"].items())
    first, second = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "two")
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def compared(model):
    texts = {"calibration": cases.batches("llama", rows=4), "evaluation": cases.batches("llama", rows=4, seed=7)}
    found = compare_pretrained(model, cases.config(sparsity=0.5), **texts, progress=False)
    return {row.method: (row.zeros, row.loss) for row in found.rows}


def compared_in_shards(name):
    return compared(sharded(name))


@pytest.mark.slow
def test_shards_are_compared_as_a_whole_model_is():
    wanted = compared(cases.build("llama", torch.float64))
    for one in together(compared_in_shards, "llama"):
        assert list(one) == list(wanted)
        for method, (zeros, loss) in one.items():
            assert (zeros, loss) == (wanted[method][0], pytest.approx(wanted[method][1], rel=1e-9))


def failing(stage):
    """The bits and the state of the shards after a failure in a stage."""
    model = sharded("llama")
    before = whole_state(model)
    owner = next(module for module in (probe_pair, pair_masks, divergence) if hasattr(module, stage))
    calls, real = [], getattr(owner, stage)

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            if stage == "run_probe":  # in the middle of a pass, with weights gathered
                work = replace(args[0], loss_fn=lambda m, batch: m(**batch).logits.sum() / 0 * float("nan"))
                return real(work, *args[1:], **kwargs)
            raise RuntimeError("on purpose")
        return real(*args, **kwargs)

    setattr(owner, stage, broken)
    with pytest.raises((RuntimeError, ValueError), match=r"on purpose|calibration loss is nan"):
        outcome(model, "llama", {"sparsity": 0.5}, 4)
    setattr(owner, stage, real)
    after = whole_state(model)
    intact = all(torch.equal(value, after[key]) for key, value in before.items())
    again = outcome(model, "llama", {"sparsity": 0.5}, 4)
    return intact, again["report"][0]


@some("stage", ["run_probe", "select_masks", "next_token_logits"], fast=("select_masks",))
def test_a_failure_leaves_the_shards_alone_and_usable(stage):
    wanted = round(0.5 * cases.CASES["llama"].targets)
    assert together(failing, stage) == [(True, wanted), (True, wanted)]


def refusals():
    said = []
    for name, options in {
        "mixtral": {"sparsity": 0.5},
        "gpt2": {"pattern": "2:4", "update": "none"},
        "llama": {"sparsity": 0.5, "refinement": "blocks"},
    }.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            outcome(sharded(name, torch.float32), name, options, 4)
        said.append(str(caught.value))
    with pytest.MonkeyPatch.context() as older:
        older.delattr(FSDPModule, "reset_iter_state")
        with pytest.raises(ValueError, match="forget a pass") as caught:
            outcome(sharded("llama", torch.float32), "llama", {"sparsity": 0.5}, 4)
    return [*said, str(caught.value)]


def test_what_cannot_be_sharded_is_refused_with_what_to_do():
    for experts, rows, blocks, older in together(refusals):
        assert "one whole model per process" in experts
        assert "sharded by inputs" in rows
        assert "refinement='blocks' trains whole blocks" in blocks
        assert "take torch 2.13 or later" in older


def test_zero_3_is_refused_with_what_to_use():
    model = cases.build("llama")
    next(model.parameters()).ds_id = 0
    with pytest.raises(ValueError, match=r"ZeRO-3.*FSDP2"):
        check_sharding(model)


def test_a_plain_model_is_not_sharded():
    model = cases.build("llama")
    assert not is_sharded(model)
    check_sharding(model)
    assert Statistics(find_targets(model), frozenset({"sequence"}), model).nbytes == 4 * cases.CASES["llama"].targets
