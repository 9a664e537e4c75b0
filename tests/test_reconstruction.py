"""Whole runs with reconstruction against a model that is really changed, block by block."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM, SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from gradprobe_hf.data.batches import Batches, from_iterable
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.targets import find_targets, is_routed
from gradprobe_hf.reconstruction import reconstruct as blockwise
from gradprobe_hf.reconstruction.hessians import WIDE, BlockHessians, lower_gram, mirrored_
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.reconstruction.reconstruct import reconstruct
from gradprobe_hf.reconstruction.task import Reconstruction
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.probing.probe_pair import ProbePair
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.updates import admm, least_squares
from gradprobe_hf.updates.admm import in_matrix, revise
from gradprobe_hf.updates.least_squares import LeastSquares
from gradprobe_hf.updates.sweep import by_saliency, fixed, inverse_factor, sweep
from tests import cases
from tests.reference.least_squares import normal_equations

MAPS = Path("/proc/self/maps")


def keep_inputs(kept, module, args):
    kept.append(args[0].flatten(0, -2))


def count_call(counts, name, *args):
    counts[name] = counts.get(name, 0) + 1


def inputs_of(model, targets, batches):
    """Of each target, `[tokens, in]`, by plain hooks in whole passes."""
    inputs = {target.name: [] for target in targets}
    handles = []
    for target in targets:
        keep = partial(keep_inputs, inputs[target.name])
        handles.append(model.get_submodule(target.sites[0].module).register_forward_pre_hook(keep))
    for batch in batches:
        model(**batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(kept) for name, kept in inputs.items()}


@torch.no_grad()
def really_changed(dense, batches, masks, config):
    """Block by block on a copy whose weights really change."""
    model = copy.deepcopy(dense)
    targets = find_targets(model)
    wanted = inputs_of(dense, targets, batches)
    for block in dict.fromkeys(target.block for target in targets):
        inside = [target for target in targets if target.block == block]
        inputs = inputs_of(model, inside, batches)
        for target in inside:
            x, weight = inputs[target.name], target.matrix(model)
            hessian = x.t() @ x
            ridge = config.damping * hessian.diagonal().mean()
            factor, _ = inverse_factor(hessian, config.damping)
            # the ridge regression of the dense outputs, drawn to the weights as they are: the normal equations
            right = weight @ wanted[target.name].t() @ x + ridge * weight
            best = torch.linalg.solve(hessian + ridge * torch.eye(len(hessian)), right.t()).t()
            start = torch.lerp(weight, best, config.dense_target)
            choose = by_saliency(config.sparsity) if masks is None else fixed(masks[target.name])
            swept, mask = sweep(start, factor, choose)
            if config.update.endswith("admm"):
                drift = (wanted[target.name] - x).t() @ x
                problem = LeastSquares(weight, hessian, drift, config.dense_target, config.damping)
                mask, _ = revise(problem, mask, in_matrix(mask))
            best = normal_equations(start, hessian + ridge * torch.eye(len(hessian)), mask)
            weight.copy_(swept if config.update in ("obs", "sparsegpt") else best)
    return model


@pytest.mark.parametrize("options", [{"score": "magnitude", "update": "obs"}, {"update": "sparsegpt"}])
def test_new_weights_that_are_not_finite_are_refused_by_name(options):
    model = cases.build("llama")
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] = torch.inf  # no matrix has it among its inputs
    before = cases.bits(model)
    with pytest.raises(ValueError, match=r"the new weights of \S+down_proj\S* are not finite"):
        cases.prune(model, cases.batches("llama"), sparsity=0.5, **options)
    assert not cases.changed(model, before)


def test_inputs_whose_squares_add_up_to_no_number_are_refused_by_name():
    """Each square is one: damping by a part of their mean would be raised for ever."""
    model = cases.build("llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.fill_(4e18)
    batches = cases.batches("llama")
    with pytest.raises(ValueError, match=r"the inputs of \S+q_proj\S* are not finite"):
        cases.prune(model, batches, sparsity=0.5, update="sparsegpt")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"update": "obs"}),
        ("gpt2", {"update": "obs", "dense_target": 0.0}),
        ("opt", {"update": "sparsegpt"}),
        ("gpt_neox", {"update": "sparsegpt", "dense_target": 0.8}),
        ("llama_tied", {"update": "least_squares"}),
        ("gpt2", {"update": "least_squares"}),
        ("opt", {"update": "sparsegpt+least_squares"}),
        ("llama", {"update": "sparsegpt+admm"}),
        ("gpt_neox", {"update": "sparsegpt+admm", "dense_target": 0.0}),
    ],
    ids=str,
)
def test_it_equals_a_model_that_is_really_changed(name, options, monkeypatch):
    for update in (least_squares, admm):
        monkeypatch.setattr(update, "STEPS", 200)  # of so few tokens the Hessians are badly conditioned
    name, tied = name.removesuffix("_tied"), name.endswith("_tied")
    model = (cases.llama(tie=True) if tied else cases.build(name)).double().eval()
    batches = [{"input_ids": batch["input_ids"]} for batch in cases.batches(name, rows=6, batch_size=2)]
    config = cases.config(sparsity=0.5, **options)
    result = cases.prune(model, batches, sparsity=0.5, **options)
    decided = None
    if config.score is not None:
        decided = cases.prune(model, batches, sparsity=0.5).masks
        assert not cases.differing(decided, result.masks)
    wanted = really_changed(model, batches, decided, config)
    for target in find_targets(model):
        torch.testing.assert_close(result.new_weights[target.name], target.matrix(wanted), rtol=1e-5, atol=1e-7)
        assert bool((result.new_weights[target.name][result.masks[target.name]] == 0).all())


def test_a_revised_mask_weighs_rows_by_both_probes_and_keeps_every_budget():
    model, batches = cases.build("llama").double().eval(), cases.batches("llama", rows=6)
    config = cases.config(sparsity=0.5, update="admm")
    decided = cases.prune(model, batches)
    result = cases.prune(model, batches, update="admm")
    targets = find_targets(model)
    diagnostics = Diagnostics()
    read = from_iterable(batches, "these")
    context = RunContext(model, None, targets, config, read, Batches.none(), progress=False)
    pair = ProbePair(context, targets, diagnostics)
    masks = pair.run(0.5)
    for target in targets:
        known = pair.first[target.name]
        wanted = (known.read("sequence") * known.factored()).sqrt().mean(1)
        torch.testing.assert_close(torch.tensor(diagnostics.row_fisher[target.name]).double(), wanted)
    rows_alike = Reconstruction(cases.workload(model, batches), targets, config, masks)
    by_hand = dataclasses.replace(rows_alike, row_fisher=diagnostics.row_fisher)
    names = [target.name for target in targets]
    assert not cases.differing(reconstruct(by_hand).masks, result.masks)
    assert cases.differing(reconstruct(rows_alike).masks, result.masks)
    assert all(result.masks[name].sum() == decided.masks[name].sum() for name in names)


@pytest.mark.parametrize(
    ("options", "axis"),
    [
        ({"scope": "row"}, 1),
        ({"score": "wanda"}, 1),
        ({"score": "magnitude"}, (0, 1)),
        ({"pattern": "2:4", "probes": 1}, None),
    ],
)
def test_a_mask_is_revised_within_what_the_budget_is_of(options, axis):
    model, batches = cases.build("llama"), cases.batches("llama")
    before = cases.prune(model, batches, **options, update="none")
    after = cases.prune(model, batches, **options, update="admm")
    assert cases.differing(before.masks, after.masks)
    for name in after.masks:
        if axis is None:
            assert bool((after.masks[name].unflatten(1, (-1, 4)).sum(2) == 2).all())
        else:
            assert torch.equal(before.masks[name].sum(axis), after.masks[name].sum(axis))
        assert bool((after.new_weights[name][after.masks[name]] == 0).all())


@pytest.mark.parametrize(("name", "kind"), list(zip(sorted(cases.CASES), cycle(["obs", "admm"]), strict=False)))
def test_every_family_is_reconstructed_and_left_alone(name, kind):
    model = cases.build(name)
    before = cases.bits(model)
    batches = cases.batches(name)
    result = cases.prune(model, batches, evaluation=batches, update=kind, score="magnitude")
    assert cases.changed(model, before) == []
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert set(result.new_weights) == {target.name for target in result.targets}
    changed = [
        not torch.equal(result.new_weights[t.name], t.matrix(model) * ~result.masks[t.name]) for t in result.targets
    ]
    assert sum(changed) > 0.5 * len(changed)
    assert result.report.zeros == sum(int(mask.sum()) for mask in result.masks.values())


@pytest.mark.parametrize("kind", ["obs", "admm"])
def test_what_is_evaluated_applied_saved_and_loaded_is_one_model(kind, tmp_path):
    model = cases.build("llama")
    calibration, evaluation = cases.batches("llama"), cases.batches("llama", seed=3)
    options = {"evaluation": evaluation, "update": kind, "output_dir": tmp_path / "out"}
    result = cases.prune(model, calibration, apply=True, probes=1, **options)
    assert len(result.new_weights) == 0, "the model has them"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert cases.changed(loaded, model.state_dict()) == []
    again = measure(cases.workload(loaded, evaluation))
    assert again.loss == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-6)
    result.save_pretrained(tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert cases.changed(loaded, model.state_dict()) == []


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("place", ["resident", "cpu", "disk"])
def test_updates_reach_the_model_wherever_it_is(place, keep, tmp_path):
    model = cases.build("llama")
    before = cases.bits(model)
    targets = find_targets(model)
    if place == "cpu":
        cpu_offload(model)
    if place == "disk":
        disk_offload(model, tmp_path / "store")
    new_weights = NewWeights(tmp_path, on_disk=place == "disk")
    masks = {target.name: torch.zeros(target.shape, dtype=torch.bool) for target in targets}
    wanted = {}
    for number, target in enumerate(targets):
        wanted[target.name] = torch.full(target.shape, float(number + 1))
        new_weights.add(target.name, wanted[target.name].clone())
    with applied(model, targets, masks, keep=keep, new_weights=new_weights):
        assert all(torch.equal(t.matrix(model), wanted[t.name]) for t in targets)
    for target in targets:
        expected = wanted[target.name] if keep else target.view(before[target.parameter])
        assert torch.equal(target.matrix(model), expected), target.name
    assert len(new_weights) == (0 if keep else len(targets))
    with pytest.raises(RuntimeError, match="on purpose"), applied(model, targets, masks, new_weights=new_weights):
        raise RuntimeError("on purpose")
    assert all(torch.equal(t.matrix(model), wanted[t.name] if keep else t.view(before[t.parameter])) for t in targets)


@pytest.mark.skipif(not MAPS.exists(), reason="no proc(5) says what is mapped")
def test_files_of_new_weights_are_mapped_while_they_are_used_and_no_longer(tmp_path):
    """Else the pages of all blocks would be resident in the end: a whole model of which one block has room."""
    new_weights, matrix = NewWeights(tmp_path, on_disk=True), torch.zeros(64, 64)
    new_weights.add("a", torch.ones(64, 64))
    values = new_weights["a"]
    assert str(tmp_path) in MAPS.read_text()
    del values
    new_weights.install("a", matrix)
    assert str(tmp_path) not in MAPS.read_text()
    assert matrix.all()
    assert not new_weights["a"].any()


@pytest.mark.parametrize("kind", ["obs", "admm"])
def test_an_offloaded_model_ends_with_the_same_weights(kind, tmp_path):
    resident, offloaded = cases.build("llama"), cases.build("llama")
    disk_offload(offloaded, tmp_path / "store")
    found = []
    for model in (resident, offloaded):
        options = {"update": kind, "probes": 1, "offload_folder": tmp_path / "scratch"}
        result = cases.prune(model, cases.batches("llama"), apply=True, **options)
        found.append({target.name: target.matrix(model).clone() for target in result.targets})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    del result
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(("share", "passes"), [(0.0, 2), (0.5, 3)])
def test_how_often_a_block_is_computed_and_no_other_with_it(share, passes):
    """Once for its Hessians, once for what it hands on, once as it was: after one pass for the order."""
    model, batches = cases.build("llama"), cases.batches("llama", rows=6, batch_size=2)
    ran = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "LlamaMLP":
            module.register_forward_hook(partial(count_call, ran, name))
    targets = find_targets(model)
    masks = PackedMasks({target.name: torch.zeros(target.shape, dtype=torch.bool) for target in targets})
    config = cases.config(update="obs", dense_target=share)
    reconstruct(Reconstruction(cases.workload(model, batches), targets, config, masks))
    assert list(ran.values()) == [1 + passes * len(batches)] * model.config.num_hidden_layers


def test_matrices_outside_of_the_blocks_are_refused():
    with pytest.raises(ValueError, match=r"lm_head\.weight lies outside of the blocks"):
        cases.prune(cases.build("llama"), cases.batches("llama"), update="obs", include=["lm_head", "q_proj"])


def test_blocks_that_share_keys_and_values_are_refused_before_any_work():
    model = cases.build("llama")
    model.config.num_kv_shared_layers = 1
    for options in ({"update": "obs"}, {"order": "sequential"}):
        with pytest.raises(ValueError, match="read keys and values that others have computed"):
            cases.prune(model, cases.batches("llama"), loss_fn=lambda *_: pytest.fail("work began"), **options)


def test_experts_in_modules_of_their_own_are_sent_other_tokens_by_the_dense_model(monkeypatch):
    """Their inputs are not compared with the dense model's, whose router sends other tokens, maybe as many."""
    model = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=cases.VOCABULARY,
            d_model=24,
            d_ff=32,
            d_kv=8,
            num_heads=3,
            num_layers=2,
            num_decoder_layers=2,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ).eval()
    drifts = {}
    plain = BlockHessians.of

    def of(self, target):
        found = plain(self, target)
        drifts[target.name] = found.drift
        return found

    monkeypatch.setattr(BlockHessians, "of", of)
    result = cases.prune(model, cases.batches("t5"), update="least_squares")
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)
    routed = {name for name in drifts if is_routed([next(t for t in result.targets if t.name == name)])}
    assert routed
    assert all((drift is None) == (name in routed) for name, drift in drifts.items())


@pytest.mark.parametrize("expert_first", [False, True])
def test_inputs_that_an_expert_has_in_common_with_another_matrix(expert_first):
    model = cases.build("llama")
    plain = find_targets(model)[0]
    expert = dataclasses.replace(plain, name="model.layers.0.mlp.experts.0.up_proj.weight")
    order = [expert, plain] if expert_first else [plain, expert]
    dense, pruned = torch.randn(2, 3, 5, plain.shape[1]).unbind()
    collected = BlockHessians(model, Processes(), has_drift=True)
    with collected.batch({"input_ids": torch.zeros(3, 5, dtype=torch.long)}):
        with collected.dense_pass():
            for target in order:
                collected.add(target, target.sites[0], dense)
        for target in order:
            collected.add(target, target.sites[0], pruned)
    x, other = pruned.flatten(0, 1), dense.flatten(0, 1)
    hessian, drift, _ = collected.of(plain)
    torch.testing.assert_close(hessian, x.t() @ x)
    torch.testing.assert_close(drift, (other - x).t() @ x)
    hessian, drift, tokens = collected.of(expert)
    torch.testing.assert_close(hessian, x.t() @ x)
    assert drift is None
    assert tokens == 3 * 5


@pytest.mark.parametrize("width", [WIDE - 1, WIDE, WIDE + 2, 2 * WIDE])
def test_panels_of_a_hessian_are_the_whole_of_it(width):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(mirrored_(lower_gram(x) + lower_gram(-x)), 2 * x.t() @ x)


def test_damping_that_was_raised_is_in_the_report():
    """Eight tokens cannot determine 24 inputs: with next to no damping, the Hessian is singular in float32."""
    text = [{"input_ids": torch.arange(8)[None]}]
    result = cases.prune(cases.build("llama"), text, update="obs", score="magnitude", damping=1e-12)
    assert any("could not be inverted with damping=1e-12" in warning for warning in result.report.warnings)


def _older():
    torch.set_float32_matmul_precision("high")


def _newer():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.fixture
def own_precision():
    """The setting of the process as it was, which the older interface reads again once both say the same."""
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("allow", [_older, _newer])
@pytest.mark.parametrize("options", [{"update": "obs"}, {"structure": {"ffn": 8}}], ids=["zeros", "channels"])
def test_matrices_are_solved_in_float32_though_the_caller_computes_in_tf32(allow, options, monkeypatch, own_precision):
    allow()
    seen, solve = [], blockwise.solve_block

    def solved(*args):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return solve(*args)

    monkeypatch.setattr(blockwise, "solve_block", solved)
    cases.prune(cases.build("llama"), cases.batches("llama"), **options)
    assert set(seen) == {"ieee"}
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    monkeypatch.setattr(blockwise, "solve_block", lambda *_: pytest.fail("in the middle of it"))
    with pytest.raises(pytest.fail.Exception):
        cases.prune(cases.build("llama"), cases.batches("llama"), **options)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
