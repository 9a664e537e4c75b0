"""Callbacks: zeros stay zeros through whatever a Trainer does, and nothing is left behind."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.pytorch_utils import Conv1D

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.training import (
    SelectiveUpdateCallback,
    SparsityCallback,
    SpikeAwareClip,
    StatePruningCallback,
    attached,
    keep_sparsity,
)
from gradprobe_hf.training.callback import StepCallback
from tests import cases
from tests.grids import grid
from tests.trainers import Rows, arguments, half_pruned, hooks_of, trained, trained_to_its_best, weights, zeros

# As this version of transformers calls it.
RECOMPUTE = next(
    one for one in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, one)
)


class Watching(TrainerCallback):
    """Whether the zeros hold after every single step, and what the gradients under them are."""

    def __init__(self, masks):
        self.masks, self.seen, self.gradients = masks, [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        targets = {t.name: t for t in find_targets(model, include=["*"])}
        counts = [
            int((targets[name].view(model.get_parameter(targets[name].parameter).grad)[mask] != 0).sum())
            for name, mask in self.masks.items()
        ]
        self.gradients.append(sum(counts))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(zeros(model, self.masks)[0])


@grid(
    "how, name",
    {
        "plain": ({}, torch.float32),
        "accumulated": ({"gradient_accumulation_steps": 3}, torch.float32),
        "clipped": ({"max_grad_norm": 0.01}, torch.float32),
        "bf16": ({"bf16": True}, torch.float32),
        "bfloat16 weights": ({}, torch.bfloat16),
        "sgd": ({"optim": "sgd", "optim_args": "momentum=0.9"}, torch.float32),
        "adafactor": ({"optim": "adafactor"}, torch.float32),
        "recomputed": ({RECOMPUTE: True}, torch.float32),
    },
    ["llama", "gpt2", "mixtral"],
)
def test_zeros_hold_after_every_step(how, name, tmp_path):
    options, dtype = how
    model, masks = half_pruned(name, dtype)
    before = weights(model)
    watching = Watching(masks)
    trained(model, tmp_path, [SparsityCallback(masks), watching], **options)
    assert watching.seen == [0] * 6
    assert watching.gradients == [0] * 6
    assert all(not torch.equal(before[key.split("[")[0]], weights(model)[key.split("[")[0]]) for key in masks)
    assert not hooks_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_half_precision_are_told_to_round_steps_away(dtype, tmp_path, caplog):
    model, masks = half_pruned(dtype=dtype)
    before = weights(model)
    trained(model, tmp_path, [SparsityCallback(masks)], learning_rate=1e-6)
    moved = sum(int((one != before[name]).sum()) for name, one in weights(model).items())
    kept = sum(one.numel() for one in before.values()) - sum(int(mask.sum()) for mask in masks.values())
    assert (moved < kept / 2) == (dtype == torch.bfloat16)
    assert ("the weights train in bfloat16, which rounds" in caplog.text) == (dtype == torch.bfloat16)


def test_without_the_callback_they_are_lost(tmp_path):
    model, masks = half_pruned()
    trained(model, tmp_path, [])
    assert zeros(model, masks)[0] > 0.9 * sum(int(mask.sum()) for mask in masks.values())


def test_pruned_gradients_do_not_count_in_the_norm(tmp_path):
    """The logged norm, and what clipping leaves of the others, are those of a naive loop that masks after backward."""
    model, masks = half_pruned()
    twin, _ = half_pruned()
    trainer = trained(
        model, tmp_path, [SparsityCallback(masks)], max_steps=1, max_grad_norm=0.05, optim="sgd", weight_decay=0.0
    )
    rows = Trainer(twin, arguments(tmp_path), train_dataset=Rows()).get_train_dataloader()
    twin.train()
    twin(**next(iter(rows))).loss.backward()
    for target in find_targets(twin):
        target.view(twin.get_parameter(target.parameter).grad)[masks[target.name]] = 0
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    torch.optim.SGD(twin.parameters(), lr=1e-2).step()
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


class OwnLoss(Trainer):
    """Makes its loss of one of the model's outputs, while the model makes one of its own."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        outputs = model(**inputs, output_hidden_states=True)
        return self.loss_of(outputs).square().mean()


@pytest.mark.parametrize(
    "loss_of", [lambda outputs: outputs.logits, lambda outputs: outputs.hidden_states[-1]], ids=["logits", "states"]
)
def test_pruned_gradients_do_not_count_in_the_norm_of_a_loss_of_ones_own(loss_of, tmp_path):
    model, masks = half_pruned()
    watching = Watching(masks)  # before the callback, which masks once more before the step
    callbacks = [watching, SparsityCallback(masks)]
    trainer = OwnLoss(model, arguments(tmp_path, max_steps=2), train_dataset=Rows(), callbacks=callbacks)
    trainer.loss_of = loss_of
    trainer.train()
    assert watching.gradients == [0] * 2
    assert not hooks_of(model)


@pytest.mark.parametrize("source", ["result", "from-zeros", "masks"])
def test_masks_come_from_anywhere(source, tmp_path):
    model = cases.build("llama")
    config = GradProbeConfig(sparsity=0.4, score="magnitude")
    result = prune_pretrained(model, config, evaluation=False, progress=False, apply=source == "from-zeros")
    given = {"result": result, "from-zeros": "from-zeros", "masks": dict(result.masks)}[source]
    callback = SparsityCallback(given)
    trained(model, tmp_path, [callback])
    assert zeros(model, result.masks)[0] == 0
    assert callback.keeper.zeros == result.report.zeros
    weights_of = sum(mask.numel() for mask in result.masks.values())
    assert callback.keeper.nbytes == pytest.approx(weights_of / 8, rel=0.02)


def test_tied_weights_stay_pruned(tmp_path):
    model = cases.build("tied")
    config = GradProbeConfig(sparsity=0.5, score="magnitude", include=["embed_tokens", "*_proj"], scope="tensor")
    result = prune_pretrained(model, config, evaluation=False, progress=False)
    trained(model, tmp_path, [SparsityCallback(result)])
    assert zeros(model, result.masks)[0] == 0
    assert any("embed_tokens" in name for name in result.masks)


def resumed(make, folder, **more):
    """The weights of a run of six steps, and of one that stopped after three and went on."""
    kept = {"save_strategy": "steps", "save_steps": 3, **more}
    model = make()
    trained(model, folder / "whole", [*callbacks_of(model)], **kept)
    first = make()
    trained(first, folder / "parts", [*callbacks_of(first)], **{**kept, "max_steps": 3})
    second = make()
    trained(second, folder / "parts", [*callbacks_of(second)], resume=str(folder / "parts" / "checkpoint-3"), **kept)
    return weights(model), weights(second)


def callbacks_of(model):
    return model.callbacks()


@grid(
    "callbacks, dtype",
    {
        "sparsity": lambda: [SparsityCallback("from-zeros")],
        "frozen": lambda: [StatePruningCallback(0.5, begin_step=1, end_step=2, every=1)],
        "pruning": lambda: [StatePruningCallback(0.5, begin_step=1, end_step=5, every=2)],
        "selective": lambda: [SelectiveUpdateCallback(top_k=1, every=4)],
        "spikes": lambda: [SpikeAwareClip(threshold=1.5, warmup=1, reset_every=4)],
        "together": lambda: [
            SparsityCallback("from-zeros"),
            SelectiveUpdateCallback(fraction=0.5),
            SpikeAwareClip(2.0, 1, None),
        ],
    },
    [torch.float32, torch.bfloat16],
)
def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_stopped(callbacks, dtype, tmp_path):
    def make():
        model, _ = half_pruned(dtype=dtype)
        model.callbacks = callbacks
        return model

    whole, parts = resumed(make, tmp_path)
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name


def test_from_zeros_resumes_with_the_masks_that_were_saved(tmp_path, caplog):
    """A kept weight that became zero on the way is no part of the mask."""
    model, masks = half_pruned()
    trained(model, tmp_path, [SparsityCallback("from-zeros")], max_steps=3, save_strategy="steps", save_steps=3)
    saved = tmp_path / "checkpoint-3"
    again = type(model).from_pretrained(saved)
    with torch.no_grad():
        name, mask = next(iter(masks.items()))
        again.get_parameter(name)[0] = 0
        assert not mask[0].all()
    again.save_pretrained(saved)
    callback = SparsityCallback("from-zeros")
    trained(again, tmp_path, [callback], resume=str(saved))
    assert callback.keeper.zeros == sum(int(mask.sum()) for mask in masks.values())
    (saved / "gradprobe_masks.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        trained(again, tmp_path, [SparsityCallback("from-zeros")], resume=str(saved))
    assert "has no masks of this callback" in caplog.text


def test_the_best_model_is_sparse_too(tmp_path):
    model, masks = half_pruned()
    trainer = trained_to_its_best(model, tmp_path, [SparsityCallback(masks)], learning_rate=0.5)
    assert trainer.state.best_global_step is not None
    assert zeros(model, masks)[0] == 0


def test_a_plain_loop_keeps_them_too():
    model, masks = half_pruned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    batch = {key: value[None] for key, value in Rows()[0].items()}
    with keep_sparsity(model, optimizer, masks) as keeper:
        for _ in range(3):
            model(**batch).loss.backward()
            for target in keeper.targets.values():
                gradient = target.view(model.get_parameter(target.parameter).grad)
                assert not gradient[masks[target.name]].any()
                assert gradient.any()
            optimizer.step()
            optimizer.zero_grad()
            assert zeros(model, masks)[0] == 0
    assert not hooks_of(model)
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SparseAdam, lr=0.1)])
def test_sparse_gradients_are_masked_in_the_rows_that_they_have(optimizer):
    """Of `nn.Embedding(sparse=True)`, beside the same embedding with dense gradients and masked by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[:, 1] = model[0].weight[2] = 0
    pruned, words = model[0].weight == 0, torch.tensor([1, 2, 2, 5])
    before = model[0].weight.detach().clone()
    stepped = optimizer([model[0].weight])
    with keep_sparsity(model, stepped):
        model(words).square().sum().backward()
        gradient = model[0].weight.grad.to_dense()
        assert not gradient[pruned].any()
        assert gradient[[1, 5]][:, [0, 2, 3]].all()
        stepped.step()
    assert torch.equal(model[0].weight == 0, pruned)
    assert torch.equal((model[0].weight != before).any(1).nonzero().flatten(), torch.tensor([1, 5]))


def test_several_optimizers_train_a_part_of_the_model_each():
    model, masks = half_pruned()
    inside = [value for name, value in model.named_parameters() if name in masks]
    others = [value for name, value in model.named_parameters() if name not in masks]
    optimizers = [torch.optim.AdamW(others, lr=1e-2), torch.optim.SGD(inside, lr=0.1, momentum=0.9)]
    batch = {key: value[None] for key, value in Rows()[0].items()}
    with (
        pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight is in no optimizer.*\[one, other\]"),
        keep_sparsity(model, optimizers[0], masks),
    ):
        pass
    with keep_sparsity(model, optimizers, masks):
        for _ in range(3):
            model(**batch).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert zeros(model, masks)[0] == 0
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in optimizers)
    with (
        pytest.raises(ValueError, match=r"is in no optimizer.*exclude"),
        attached(StatePruningCallback(0.6), model, torch.optim.AdamW(others)),
    ):
        pass
    with (
        pytest.raises(TypeError, match="works with one optimizer, got 2"),
        attached(StatePruningCallback(0.6), model, optimizers),
    ):
        pass
    for parameter in inside:
        parameter.requires_grad_(False)
    with keep_sparsity(model, optimizers[0], masks):  # what does not train needs none
        pass


def test_an_optimizer_for_each_parameter_may_step_inside_of_backward():
    """The weights of the others are still needed there, and must not be touched."""
    model, masks = half_pruned()
    plain, _ = half_pruned()
    batch = {key: value[None] for key, value in Rows()[0].items()}
    each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter, optimizer in each.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with keep_sparsity(model, list(each.values()), masks):
        model(**batch).loss.backward()
    with keep_sparsity(plain, torch.optim.SGD(plain.parameters(), lr=0.1), masks) as keeper:
        plain(**batch).loss.backward()
        keeper.mask_gradients()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert zeros(model, masks)[0] == 0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_that_does_not_train_is_refused_for_that():
    model, _ = half_pruned()
    optimizer = torch.optim.AdamW(model.requires_grad_(False).parameters())
    with (
        pytest.raises(ValueError, match=r"requires a grad.*requires_grad_\(True\)"),
        keep_sparsity(model, optimizer),
    ):
        pass


def test_momentum_from_before_the_mask_moves_no_zero():
    """Masked gradients are not enough: the optimizer still has what it gathered when the weights were dense."""
    model, masks = half_pruned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = {key: value[None] for key, value in Rows()[0].items()}
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert zeros(model, masks)[0] > 0  # so the step has moved weights under the mask
    with keep_sparsity(model, optimizer, masks):
        model(**batch).loss.backward()
        optimizer.step()
        assert zeros(model, masks)[0] == 0


def test_accelerates_loop_keeps_them_too():
    model, masks = half_pruned()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = {key: value[None] for key, value in Rows()[0].items()}
    with keep_sparsity(model, optimizer, masks):
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert zeros(model, masks)[0] == 0


def test_steps_are_counted_from_where_a_run_went_on():
    class Counting(StepCallback):
        def begin(self):
            self.steps = []

        def after_step(self):
            self.steps.append(self.step)

    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with attached(Counting(), layer, optimizer, step=5) as counting:
        for _ in range(3):
            layer(torch.ones(2)).sum().backward()
            optimizer.step()
    assert counting.steps == [6, 7, 8]


@pytest.mark.parametrize("remembers", [True, False])
def test_what_a_run_of_ones_own_remembers_goes_on_with_it(remembers, tmp_path, caplog):
    """A schedule that had begun at the model's zeros began at none, and weights came back that had gone."""

    def run(steps, model, optimizer, **begun):
        callback = StatePruningCallback(0.6, "magnitude", begin_step=2, end_step=20, every=4)
        with attached(callback, model, optimizer, **begun):
            for step in steps:
                torch.manual_seed(step)
                model(**{key: value[None] for key, value in Rows()[step].items()}).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            callback.save(tmp_path)
        return [(one.step, one.sparsity) for one in callback.history]

    models = [half_pruned()[0] for _ in range(2)]
    whole, parted = (torch.optim.SGD(model.parameters(), lr=0.01) for model in models)
    updates = run(range(16), models[0], whole)
    run(range(8), models[1], parted)
    caplog.clear()
    resumed = run(range(8, 16), models[1], parted, step=8, checkpoint=tmp_path if remembers else None)
    if remembers:
        assert resumed == updates
        assert all(torch.equal(*both) for both in zip(*(model.parameters() for model in models), strict=True))
    else:
        assert "StatePruningCallback goes on at step 8 and knows nothing of the steps before" in caplog.text


def test_a_checkpoint_that_is_refused_leaves_no_callback_behind(tmp_path):
    class Refusing(StatePruningCallback):
        def restore(self, folder):
            raise ValueError("of another run")

    model, masks = half_pruned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refusing = Refusing(0.6, "magnitude")
    with pytest.raises(ValueError, match="of another run"), attached(refusing, model, optimizer, 3, tmp_path):
        pass
    with attached(SparsityCallback(masks), model, optimizer):
        pass
    begun = attached(SparsityCallback(masks), model, optimizer, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="say how many steps it took"), begun:
        pass


def test_conv1d_is_masked_the_right_way_round(tmp_path):
    model, masks = half_pruned("gpt2")
    name = next(name for name in masks if "c_attn" in name)
    assert isinstance(model.get_submodule(name.removesuffix(".weight")), Conv1D)
    assert masks[name].shape == model.get_parameter(name).t().shape
    trained(model, tmp_path, [SparsityCallback(masks)])
    assert zeros(model, masks) == (0, 0)


WAITING = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"}


def waits(callback, model):
    """What makes the host wait for a device in one step of a callback: its hooks, and what it does before and after."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for parameter in model.parameters():
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        callback.before_step()
        callback.after_step()
    return [event.name for event in profile.events() if event.name in WAITING]


@pytest.mark.parametrize(
    ("make", "waits_at"),
    [
        (lambda masks: SparsityCallback(masks), ()),
        (lambda masks: StatePruningCallback(0.6, begin_step=3, end_step=7, every=4), (3, 7)),
        (lambda masks: SelectiveUpdateCallback(top_k=1, every=4), ()),  # on the CPU `tolist` needs no copy
        (lambda masks: SpikeAwareClip(threshold=1.0, warmup=1, reset_every=4), ()),
    ],
    ids=["sparsity", "state", "selective", "spikes"],
)
def test_between_updates_the_host_waits_for_nothing(make, waits_at):
    model, masks = half_pruned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {key: value[None] for key, value in Rows()[0].items()}
    found = {}
    model(**batch).loss.backward()
    optimizer.step()
    with attached(make(masks), model, optimizer, step=1) as callback:
        for step in range(2, 10):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            callback.step = step
            for state in optimizer.state.values():  # as if the optimizer had taken the step
                state["step"].fill_(step)
            found[step] = waits(callback, model)
            callback.add_hooks()
    assert {step for step, events in found.items() if events} == set(waits_at)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda masks: SparsityCallback(masks), marks=pytest.mark.slow),
        lambda masks: StatePruningCallback(0.5, begin_step=1, end_step=8, every=1),
    ],
    ids=["sparsity", "state"],
)
def test_masks_that_change_compile_nothing_again(make):
    """Weights are edited in place, and gradients where they arrive: the compiled graph sees neither."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, masks = half_pruned()
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    masks = {name: mask for name, mask in masks.items() if "layers.0." in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="aot_eager")
    batch = {key: value[None] for key, value in Rows()[0].items()}
    counts = []
    with attached(make(masks), compiled, optimizer) as callback:
        for _ in range(10):
            compiled(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(dict(torch._dynamo.utils.counters["stats"]))
        assert zeros(model, callback.keeper.masks)[0] == 0
    assert counts[0]["unique_graphs"] == counts[-1]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "callback",
    [
        lambda: SparsityCallback("from-zeros"),
        lambda: StatePruningCallback(0.5, "magnitude", begin_step=1, end_step=1),
    ],
    ids=["sparsity", "state"],
)
def test_gradients_of_a_pass_that_no_hook_saw_are_masked_before_the_step(callback, tmp_path):
    """A pass whose graph is dropped takes the hooks along, and the pass behind it trains."""

    class Twice(Trainer):
        def compute_loss(self, model, inputs, *more, **options):
            float(model(**inputs).loss.detach())  # a measurement, say
            return super().compute_loss(model, inputs, *more, **options)

    model, masks = half_pruned()
    watching = Watching(masks)
    kept = callback()
    callbacks = [kept, watching]
    Twice(model, arguments(tmp_path), train_dataset=Rows(), callbacks=callbacks).train()
    assert watching.gradients[1:] == [0] * 5
    assert kept.keeper.nonzero() == 0


@pytest.mark.parametrize(
    ("make", "callback"),
    [
        (half_pruned, lambda: SparsityCallback("from-zeros")),
        (
            lambda seed: (cases.build("llama", seed=seed), None),
            lambda: StatePruningCallback(0.5, begin_step=1, end_step=2),
        ),
    ],
    ids=["sparsity", "state"],
)
def test_masks_of_another_run_are_refused(make, callback, tmp_path, caplog):
    """A callback reads masks from output_dir, where a run that goes on from elsewhere may find another's."""
    saved = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    for seed, name in enumerate(["one", "other"]):
        trained(make(seed=seed)[0], tmp_path / name, [callback()], **saved)
    model = make(seed=0)[0]
    one = str(tmp_path / "one" / "checkpoint-3")
    with pytest.raises(ValueError, match=r"other/checkpoint-3 are of other weights: .* resume from a checkpoint in"):
        trained(model, tmp_path / "other", [callback()], resume=one)
    assert "has no masks of this callback" not in caplog.text
    kept = callback()
    trained(model, tmp_path / "nowhere", [kept], resume=one)
    assert "has no masks of this callback: the weights that are zero now are kept" in caplog.text
    assert kept.keeper.nonzero() == 0


def test_masks_that_lie_inside_of_the_zeros_are_refused(tmp_path):
    """Two magnitude prunings of one model, resumed in the folder of the wrong one: half of the zeros would train."""
    saved = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}

    def pruned(sparsity):
        model = cases.build("llama")
        cases.prune(model, None, score="magnitude", sparsity=sparsity, update="none", apply=True)
        return model

    for sparsity in (0.3, 0.6):
        trained(pruned(sparsity), tmp_path / str(sparsity), [SparsityCallback()], **saved)
    more, less = (str(tmp_path / str(sparsity) / "checkpoint-3") for sparsity in (0.6, 0.3))
    with pytest.raises(
        ValueError, match=r"0\.3/checkpoint-3 are of other weights: [\d,]+ weights that are zero are not"
    ):
        trained(pruned(0.6), tmp_path / "0.3", [SparsityCallback()], resume=more)
    model = pruned(0.3)
    rounded = next(parameter for name, parameter in model.named_parameters() if name.endswith("up_proj.weight"))
    with torch.no_grad():
        rounded[0, rounded[0] != 0] *= 0
    trained(model, tmp_path / "0.3", [kept := SparsityCallback()], resume=less)
    assert kept.keeper.nonzero() == 0


def convolutional(layout=torch.contiguous_format):
    """Half of each convolution is zero, a weight is new, and of a parameter that is none zero says something else."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    model = ResNetForImageClassification(config).to(memory_format=layout)
    model.register_parameter("new_weight", torch.nn.Parameter(torch.zeros(1, 4, 4)))
    model.register_parameter("A_log", torch.nn.Parameter(torch.arange(1.0, 5.0).log().expand(2, 4).clone()))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 4:
                parameter[parameter.abs() <= parameter.abs().median()] = 0
    return model


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_zeros_of_what_no_run_prunes_are_kept(layout, tmp_path, caplog):
    model = convolutional(layout)
    before = {name: value == 0 for name, value in weights(model).items() if value.ndim == 4}
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    rows = [{"pixel_values": one, "labels": number % 3} for number, one in enumerate(images)]
    saved = {"save_strategy": "steps", "save_steps": 2}
    gradients = []

    class Looking(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            gradients.extend(model.get_parameter(name).grad[zero].any() for name, zero in before.items())

    for steps, resume in ((2, None), (4, str(tmp_path / "checkpoint-2"))):
        callback = SparsityCallback("from-zeros")
        options = arguments(tmp_path, max_steps=steps, **saved)
        trainer = Trainer(model, options, train_dataset=rows, callbacks=[callback, Looking()])
        trainer.train(resume_from_checkpoint=resume)
        assert set(callback.keeper.targets) == set(before)
    assert "new_weight is all zeros, as one that has yet to learn: it trains" in caplog.text
    for name, zero in before.items():
        assert torch.equal(model.get_parameter(name) == 0, zero), name
    assert gradients
    assert not any(gradients)


def test_masks_of_what_no_run_prunes_can_be_given():
    model = convolutional()
    name = next(name for name, value in model.named_parameters() if value.ndim == 4)
    mask = model.get_parameter(name) == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with keep_sparsity(model, optimizer, {name: mask}) as keeper:
        model(torch.randn(2, 3, 32, 32)).logits.sum().backward()
        optimizer.step()
    assert keeper.zeros == int(mask.sum())
    assert torch.equal(model.get_parameter(name) == 0, mask)


def test_zeros_of_a_router_are_kept(tmp_path):
    model = cases.build("mixtral")
    router = model.get_parameter("model.layers.0.mlp.gate.weight")
    with torch.no_grad():
        router[:, ::2] = 0
    trained(model, tmp_path, [SparsityCallback("from-zeros")])
    assert not router[:, ::2].any()
    assert router.any()


def backward(model, optimizer, number):
    """The gradients of a row, and its loss; the fifth is a spike."""
    optimizer.zero_grad()
    batch = {key: value[None] for key, value in Rows()[number].items()}
    loss = model(**batch).loss * (1000 if number == 4 else 1)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda masks: SparsityCallback(masks),
        lambda masks: SelectiveUpdateCallback(top_k=1, every=2),
        lambda masks: SpikeAwareClip(threshold=1.0, warmup=2, reset_every=None),
    ],
    ids=["sparsity", "selective", "spikes"],
)
def test_a_step_by_a_closure_is_one_without(make, by_name):
    """Lightning steps so: the gradients are made inside of the optimizer's step, and complete at the closure's end."""
    found = []
    for closes in (False, True):
        model, masks = half_pruned()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        callback, losses = make(masks), []
        with attached(callback, model, optimizer):
            for number in range(6):
                closure = partial(backward, model, optimizer, number)
                if closes:
                    losses.append(optimizer.step(closure=closure) if by_name else optimizer.step(closure))
                else:
                    losses.append(closure())
                    optimizer.step()
        moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
        found.append([*map(torch.clone, weights(model).values()), *moments, *losses, torch.tensor(callback.step)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("options", [{}, {"structure": {"ffn": 8}}, {"recovery_steps": 1}], ids=str)
def test_a_result_that_was_not_applied_is_no_mask(options):
    """Its masks alone, on the dense weights, are another model than it reports."""
    asked = {"config": GradProbeConfig(**options), "calibration": cases.batches("llama")}
    found = prune_pretrained(cases.build("llama"), **asked, evaluation=False, progress=False, apply=False)
    optimizer = torch.optim.SGD(found.model.parameters(), lr=0.1)
    for use in (lambda: keep_sparsity(found.model, optimizer, found).__enter__(), lambda: SparsityCallback(found)):
        with pytest.raises(ValueError, match=r"this result was not applied \(apply=False\).*apply=True"):
            use()


def test_a_result_that_was_not_applied_and_changes_no_kept_weight_is_one():
    asked = {"config": GradProbeConfig(preset="fast"), "calibration": cases.batches("llama")}
    found = prune_pretrained(cases.build("llama"), **asked, evaluation=False, progress=False, apply=False)
    optimizer = torch.optim.SGD(found.model.parameters(), lr=0.1)
    with keep_sparsity(found.model, optimizer, found):
        pass
    expected = prune_pretrained(cases.build("llama"), **asked, evaluation=False, progress=False).model
    assert all(map(torch.equal, found.model.parameters(), expected.parameters()))


def test_a_step_that_a_scaler_leaves_out_is_none():
    """A fused optimizer is called for gradients that are no numbers, too, and told not to step."""

    class Steps(StepCallback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def before_step(self):
            self.seen.append(("before", self.step))

        def after_step(self):
            self.seen.append(("after", self.step))

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attached(Steps(), model, optimizer) as callback:
        for factor in (1.0, float("inf"), 1.0):
            before = model.weight.detach().clone()
            scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(before, model.weight) == (factor != 1)
    assert callback.seen == [("before", 1), ("after", 1), ("before", 2), ("after", 2)]


def test_a_search_whose_trials_have_folders_of_their_own_is_told(tmp_path, caplog):
    state = TrainerState(global_step=3, is_hyper_param_search=True)
    with caplog.at_level(logging.WARNING):
        SparsityCallback("from-zeros").on_save(arguments(tmp_path), state, TrainerControl())
    assert "SparsityCallback saves nothing in a search for hyperparameters" in caplog.text
