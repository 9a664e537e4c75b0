"""Experts that go: which, by torch.autograd; a router that knows of it; whole runs."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.passes.routing import mixtures, routed
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.engine import ProbePass, Workload, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.probe.steps import single_rows
from gradprobe_hf.structures.table import shape_words
from tests import cases
from tests.launch import together
from tests.reference import naive
from tests.structure_page import FAMILIES
from tests.test_processes import pruned


def mixture(dtype=torch.float32):
    """With router rows that are far apart: it chooses, and does not toss."""
    model = cases.build("mixtral")
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def loss_of(model, batches):
    with torch.no_grad():
        sums = [summed_loss(model, batch) for batch in batches]
    return sum(float(one) for one, _ in sums) / sum(int(terms) for _, terms in sums)


def gated(experts, gates):
    """The experts of Mixtral, written out, each times its gate."""

    def forward(hidden, chosen, weights):
        out = torch.zeros_like(hidden)
        for token in range(len(hidden)):
            for expert, weight in zip(chosen[token], weights[token], strict=True):
                gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
                made = experts.down_proj[expert] @ (experts.act_fn(gate) * up)
                out[token] = out[token] + gates[expert] * weight * made
        return out

    return forward


def fisher_of(model):
    """Of gates on the experts of each block, by autograd, one row of the text at a time, `[blocks, experts]`."""
    layers = model.model.layers
    gates = [nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in layers]
    fisher = torch.zeros(len(layers), 4, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patched:
        for layer, gate in zip(layers, gates, strict=True):
            patched.setattr(layer.mlp.experts, "forward", gated(layer.mlp.experts, gate))
        for row in cases.batches("mixtral", batch_size=1):
            fisher += torch.stack(torch.autograd.grad(naive.sequence_loss(model, row), gates)).square()
    return fisher


def test_the_bias_of_an_expert_is_part_of_what_its_gate_is_on(monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = GptOssForCausalLM(
        GptOssConfig(
            **sizes,
            vocab_size=64,
            pad_token_id=0,
            num_key_value_heads=2,
            head_dim=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["full_attention"] * 2,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model = model.double().eval()
    rows = torch.randint(4, 64, (6, 9))
    readers = [target for target in find_targets(model) if "down_proj" in target.name]
    units = {reader.name: 1 for reader in readers}
    statistics = Statistics(readers, frozenset({"gates"}), model, units=units)
    run_probe(Workload(model, [{"input_ids": rows}], progress=False), ProbePass(readers, statistics))
    measured = torch.cat([statistics[reader.name].gates.squares for reader in readers]).view(2, 4)
    model.set_experts_implementation("eager")
    experts = [module for module in model.modules() if type(module).__name__ == "GptOssExperts"]
    wanted = torch.zeros_like(measured)
    for row in rows:
        gates = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        for module, own in zip(experts, gates, strict=True):
            monkeypatch.setattr(module, "forward", partial(_gated_by_weights, module, own))
        wanted += torch.autograd.grad(naive.sequence_loss(model, {"input_ids": row[None]}), gates)[0].square()
    torch.testing.assert_close(measured, wanted)


def _gated_by_weights(module, gates, hidden, chosen, weights):
    """What experts hand on, each times its gate: the router's weight is all that it is multiplied with."""
    return type(module).forward(module, hidden, chosen, weights * gates[chosen])


def test_a_mixture_in_float64_is_pruned_with_an_update():
    """transformers' product of all experts at once takes no float64."""
    batches = cases.batches("mixtral")
    result = cases.prune(mixture(torch.float64), batches, update="least_squares", evaluation=batches)
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("rounds", [1, 2])
def test_those_go_whose_gates_have_the_least_fisher_information(rounds):
    """In two rounds: the second as the model says that is left of the first."""
    model, batches = mixture(torch.float64), cases.batches("mixtral")
    options = {"structure": {"experts": 2}, "update": "none", "structure_rounds": rounds}
    result = cases.prune(model, batches, **options)
    assert result.report.passes == {"forward": rounds, "backward": rounds}
    routers = [f"model.layers.{number}.mlp.gate" for number in range(len(model.model.layers))]
    gone = {router: torch.zeros(4, dtype=torch.bool) for router in routers}
    for number in range(1, rounds + 1):
        with routed(model, gone):
            fisher = fisher_of(model)
        for router, scores in zip(routers, fisher, strict=True):
            order = scores.masked_fill(gone[router], -torch.inf).argsort()
            gone[router] = torch.zeros(4, dtype=torch.bool).index_fill_(0, order[: 2 * number // rounds], True)
    assert all(torch.equal(result.removal.experts[router], gone[router]) for router in routers)


def test_a_router_without_some_experts_chooses_as_if_they_had_minus_infinity():
    model, hidden = mixture(), torch.randn(50, 16)
    router = model.model.layers[0].mlp.gate
    gone = torch.tensor([False, True, False, False])
    logits, _, before = router(hidden)
    with routed(model, {"model.layers.0.mlp.gate": gone}):
        masked, weights, chosen = router(hidden)
        copied = copy.deepcopy(model)
    assert (before == 1).any()
    wanted = logits.masked_fill(gone, -torch.inf)
    torch.testing.assert_close(masked, wanted)
    best, order = wanted.softmax(-1).topk(2)
    assert torch.equal(chosen, order)
    torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True))
    assert torch.equal(router(hidden)[2], before)
    assert torch.equal(copied.model.layers[0].mlp.gate(hidden)[2], order)  # a copy stays as it was copied


@pytest.mark.parametrize(
    "options",
    [
        {"structure": {"experts": 2}, "update": "none"},
        pytest.param({"structure": {"experts": 0.25, "kv_groups": 1}, "refinement": "blocks"}, marks=pytest.mark.slow),
        {"structure": "auto", "params": 0.75},
    ],
    ids=str,
)
def test_a_whole_run(options, tmp_path):
    model, batches = mixture(), cases.batches("mixtral")
    config = GradProbeConfig(**options)
    options = {"calibration": batches, "evaluation": batches, "progress": False}
    result = prune_pretrained(model, config, **options, output_dir=tmp_path / "made")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(info.values())
    removed, structure = result.report.structure["removed"], result.report.structure
    assert loaded.config.num_local_experts == 4 - removed["experts"]
    assert loaded.num_parameters() == structure["parameters"]["after"]
    assert loss_of(loaded, batches) == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-5)
    # In memory it keeps its shapes, and does the same; so it does when it is saved once more.
    assert loss_of(result.model, batches) == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-5)
    assert loss_of(copy.deepcopy(result.model), batches) == loss_of(result.model, batches)
    result.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert cases.changed(again, cases.bits(loaded)) == []
    batch = {"input_ids": batches[0]["input_ids"]}
    assert loaded.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (2, 15)
    assert shape_words({"experts": removed["experts"]}) in (tmp_path / "made" / "README.md").read_text()


@pytest.mark.parametrize("apply", [False, True])
def test_a_dry_run_and_one_that_fails_leave_routers_as_they_were(apply, tmp_path, monkeypatch):
    model, batches = mixture(), cases.batches("mixtral")
    dense, before = cases.bits(model), loss_of(model, batches)
    config = GradProbeConfig(structure={"experts": 2})
    options = {"calibration": batches, "evaluation": False, "progress": False}
    if apply:
        monkeypatch.setattr("gradprobe_hf.run.request.inputs.check_example", lambda *_: None)
        monkeypatch.setattr("gradprobe_hf.run.shapes.equality.TOLERANCE", {torch.float32: -1.0})
        with pytest.raises(RuntimeError, match="does not compute what the masked one does"):
            prune_pretrained(model, config, **options, output_dir=tmp_path / "made")
        assert list(tmp_path.iterdir()) == []
    else:
        prune_pretrained(model, config, **options, apply=False).save_pretrained(tmp_path / "made")
    assert cases.changed(model, dense) == []
    assert loss_of(model, batches) == before
    assert all("forward" not in module.__dict__ for module in model.modules())


# Where a family keeps what its router has of each expert: in the router alone, in a map inside of it, in the module
# around it, which hands it over, and as one row of all experts.
ROUTERS = ["Mixtral", "Gemma 4 MoE", "MiniMax-M2", "AFMoE", "ERNIE 4.5 MoE"]


def of_family(name):
    return next(one for one in FAMILIES if one.name == name).make()


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_knows_which_experts_are_gone_wherever_its_rows_are(name):
    model, batch = of_family(name), cases.batches("mixtral")[0]
    found = mixtures(model)
    dense, _ = summed_loss(model, batch)
    gone = {one.router: torch.arange(one.count) < one.count - 2 for one in found}  # each token is sent to two
    chosen = []
    for one in found:
        model.get_submodule(one.experts).register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    with routed(model, gone):
        few, _ = summed_loss(model, batch)
    assert len(chosen) == len(found) > 0
    assert all({*experts.flatten().tolist()} == {4, 5} for experts in chosen)
    assert few != dense
    assert summed_loss(model, batch)[0] == dense
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", [ROUTERS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ROUTERS[1:])])
def test_a_mixture_on_disk_ends_as_one_in_memory(name, tmp_path):
    of_family(name).save_pretrained(tmp_path / "dense")
    found = []
    for place, placed in (("memory", {}), ("disk", {"device_map": "disk", "offload_folder": tmp_path / "offload"})):
        prune_pretrained(
            tmp_path / "dense",
            GradProbeConfig(structure={"experts": 2, "blocks": 1}),
            calibration=cases.batches("mixtral"),
            evaluation=False,
            output_dir=tmp_path / place,
            progress=False,
            **placed,
        )
        found.append(AutoModelForCausalLM.from_pretrained(tmp_path / place))
    assert cases.changed(found[0], cases.bits(found[1])) == []


def test_two_processes_choose_the_experts_of_one():
    options = {"structure": {"experts": 2}, "structure_rounds": 2}
    alone = pruned("mixtral", torch.float32, 8, options)
    for one in together(pruned, "mixtral", torch.float32, 8, options):
        assert all(torch.equal(mask, one["masks"][name]) for name, mask in alone["masks"].items())
        assert one["evaluation"]["pruned"]["loss"] == pytest.approx(alone["evaluation"]["pruned"]["loss"], rel=1e-4)


def test_images_of_several_sequences_in_one_tensor_are_refused():
    """Patches have no row for each sequence: a mixture, which is probed one sequence at a time, cannot deal them."""
    model, patches = cases.build("mixtral"), torch.ones(32, 8)
    with pytest.raises(ValueError, match=r"pixel_values of shape \(32, 8\) with 2 sequences.*set batch_size=1"):
        list(single_rows(model, {"input_ids": torch.ones(2, 4, dtype=torch.long), "pixel_values": patches}))
    (single,) = single_rows(model, {"input_ids": torch.ones(1, 4, dtype=torch.long), "pixel_values": patches})
    assert single["pixel_values"] is patches
