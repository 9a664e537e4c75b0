"""Training that fails leaves no hook behind; what cannot work is refused before it begins."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import Trainer, TrainerCallback

from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.training import (
    SelectiveUpdateCallback,
    SparsityCallback,
    SpikeAwareClip,
    StatePruningCallback,
    attached,
    keep_sparsity,
)
from gradprobe_hf.training.pass_hooks import PassHooks
from tests import cases
from tests.trainers import Rows, arguments, half_pruned, hooks_of, trained, weights


class Failing(TrainerCallback):
    def __init__(self, event):
        setattr(self, event, self.fail)

    def fail(self, *args, **kwargs):
        raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    "event", ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]
)
def test_no_hook_is_left_when_training_fails(event, tmp_path):
    model, masks = half_pruned()
    callbacks = [SparsityCallback(masks), SelectiveUpdateCallback(top_k=1), SpikeAwareClip()]
    failing = Failing(event)
    first = event == "on_step_begin"  # ours would have put up its hooks, and no later event would take them away
    with pytest.raises(RuntimeError, match="on purpose"):
        trained(model, tmp_path, [failing, *callbacks] if first else [*callbacks, failing])
    assert not hooks_of(model)


def test_no_hook_is_left_when_a_pass_fails(tmp_path):
    model, masks = half_pruned()
    inner = model.model.layers[1].mlp
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("on purpose")

    handle = inner.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        trained(model, tmp_path, [SparsityCallback(masks)])
    handle.remove()
    assert not hooks_of(model)
    with pytest.raises(RuntimeError, match="a broken row"):
        Trainer(
            model, arguments(tmp_path), train_dataset=Rows(8, fails_at=5), callbacks=[SparsityCallback(masks)]
        ).train()
    assert not hooks_of(model)


class Breaking(Trainer):
    """Fails in the loss, or in the backward pass."""

    def __init__(self, *arguments, where, **options):
        super().__init__(*arguments, **options)
        self.where = where

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.where == "loss":
            raise MemoryError("in the loss")
        loss.register_hook(lambda gradient: (_ for _ in ()).throw(MemoryError("in backward")))
        return loss


@pytest.mark.parametrize("where", ["loss", "backward"])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_fails_behind_the_forward_pass_takes_the_hooks_along(where, accumulation, tmp_path):
    model, masks = half_pruned()
    options = arguments(tmp_path, gradient_accumulation_steps=accumulation)
    trainer = Breaking(model, options, train_dataset=Rows(), callbacks=[SparsityCallback(masks)], where=where)
    with pytest.raises(MemoryError):
        trainer.train()
    gc.collect()
    assert not hooks_of(model)


def test_the_with_leaves_nothing_although_the_error_is_held(tmp_path):
    model, masks = half_pruned()
    with pytest.raises(MemoryError) as held, SparsityCallback(masks) as callback:
        Breaking(model, arguments(tmp_path), train_dataset=Rows(), callbacks=[callback], where="backward").train()
    assert held.value is not None
    assert not hooks_of(model)


def test_gradients_are_masked_in_an_except_block_too(tmp_path):
    """A hook that took the error the caller handles for one of the pass would take the others away."""
    model, masks = half_pruned()
    seen = []

    class Looking(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            seen.extend(
                int((target.view(model.get_parameter(target.parameter).grad)[masks[target.name]] != 0).sum())
                for target in find_targets(model)
            )

    try:
        raise RuntimeError("a first attempt")
    except RuntimeError:
        trained(model, tmp_path, [SparsityCallback(masks), Looking()])
    assert seen
    assert not any(seen)


def test_hooks_wait_for_the_last_graph_of_their_own_pass():
    layer, hooks = torch.nn.Linear(2, 1), PassHooks()

    def put_up():
        hooks.add([layer.weight.register_post_accumulate_grad_hook(lambda _: None)])
        hooks.remove_after_pass(layer)

    put_up()
    first, second = layer(torch.ones(2)), layer(torch.ones(2))
    del first
    assert hooks
    hooks.remove()
    put_up()
    del second  # of an earlier pass, and kept until now
    assert hooks
    third = layer(torch.ones(2))
    del third
    assert not hooks
    assert not layer._forward_hooks
    assert not layer.weight._post_accumulate_grad_hooks


def test_a_callback_that_is_gone_takes_its_hooks_along(tmp_path):
    model, masks = half_pruned()
    callback = SparsityCallback(masks)
    callback.start(model, torch.optim.AdamW(model.parameters()))
    callback.add_hooks()
    assert hooks_of(model)
    del callback
    gc.collect()
    assert not hooks_of(model)


def test_a_failed_run_does_not_stand_in_the_way_of_the_next(tmp_path):
    model, masks = half_pruned()
    with pytest.raises(RuntimeError):
        trained(model, tmp_path, [SparsityCallback(masks), Failing("on_step_end")])
    trained(model, tmp_path, [StatePruningCallback(0.6, begin_step=1, end_step=3, every=1)])
    total = sum(target.numel for target in find_targets(model))
    assert sum(int((t.matrix(model) == 0).sum()) for t in find_targets(model)) == round(0.6 * total)


def test_two_that_decide_zeros_are_refused(tmp_path):
    model, masks = half_pruned()
    with pytest.raises(ValueError, match="both say which weights are zero"):
        trained(model, tmp_path, [SparsityCallback(masks), StatePruningCallback(0.6)])
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(ValueError, match="Use one at a time"),
        attached(StatePruningCallback(0.6), model, optimizer),
        attached(SparsityCallback(masks), model, optimizer),
    ):
        pass
    assert not hooks_of(model)
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ("from-ones", "masks='from-ones'"),
        ({}, "masks for nothing"),
        ({"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}, "layers.9"),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2).bool()}, r"is \(2, 2\), and the matrix"),
        ("from-zeros", "no weight of the model is zero"),
    ],
)
def test_bad_masks_are_refused_before_training(masks, message, tmp_path):
    model = cases.build("llama")
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        trained(model, tmp_path, [SparsityCallback(masks)])
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def test_a_wrapper_of_deepspeed_is_refused():
    class DeepSpeedOptimizerWrapper(torch.optim.SGD):
        pass

    model, masks = half_pruned()
    with (
        pytest.raises(ValueError, match="cannot work under DeepSpeed"),
        keep_sparsity(model, DeepSpeedOptimizerWrapper(model.parameters(), lr=0.1), masks),
    ):
        pass
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer"), keep_sparsity(model, object(), masks):
        pass
