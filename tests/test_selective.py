"""Selective updates and spike-aware clipping: who trains, and by how much at most."""

from __future__ import annotations

import logging

import pytest
import torch

from gradprobe_hf.training import SelectiveUpdateCallback, SpikeAwareClip, StatePruningCallback, attached
from gradprobe_hf.training.selective import OUTSIDE, REST
from gradprobe_hf.training.spikes import clip_spikes
from tests import cases
from tests.trainers import Rows, trained, weights


def batch(row=0):
    return {key: value[None] for key, value in Rows()[row].items()}


def groups_that_moved(callback, before, model):
    now = weights(model)
    moved = {name for name in now if not torch.equal(before[name], now[name])}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        label
        for label, parameters in callback.members.items()
        if any(names[id(parameter)] in moved for parameter in parameters)
    }


@pytest.mark.parametrize("groups", ["block", "matrix", ["q_proj.weight", "*.mlp.*"]], ids=str)
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_only_the_groups_with_the_largest_gradients_move(name, groups):
    model = cases.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with attached(SelectiveUpdateCallback(top_k=1, groups=groups), model, optimizer) as callback:
        for step in range(4):
            model(**batch(step)).loss.backward()
            norms = {
                label: sum(float(p.grad.double().square().sum()) for p in parameters)
                for label, parameters in callback.members.items()
            }
            before = weights(model)
            optimizer.step()
            optimizer.zero_grad()
            assert groups_that_moved(callback, before, model) == {max(norms, key=norms.get)}
    assert sum(callback.counts.values()) == 4


def test_zeroed_gradients_would_have_moved_them():
    """Why the gradient is None: with zeros AdamW goes on by momentum and weight decay."""
    model = cases.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model(**batch()).loss.backward()
    optimizer.step()
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()
    assert all(not torch.equal(before[name], value) for name, value in weights(model).items() if value.ndim == 2)


def test_a_choice_stands_for_as_many_steps_as_asked():
    model = cases.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen = []
    with attached(SelectiveUpdateCallback(fraction=0.2, every=3, groups="matrix"), model, optimizer) as callback:
        for step in range(7):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            chosen.append(tuple(callback.chosen))
    assert chosen[0] == chosen[1] == chosen[2]
    assert chosen[3] == chosen[4] == chosen[5]
    assert len(chosen[0]) == round(0.2 * len(callback.members))


def test_the_report_says_who_trained_how_often(tmp_path, caplog):
    callback = SelectiveUpdateCallback(top_k=1)
    with caplog.at_level(logging.INFO, logger="gradprobe_hf"):
        trained(cases.build("llama"), tmp_path, [callback])
    assert set(callback.members) == {"model.layers.0", "model.layers.1", "model.layers.2", OUTSIDE}
    assert sum(callback.counts.values()) == 6
    label, count = callback.counts.most_common(1)[0]
    assert f"{count:8d}  {label}" in callback.summary()
    assert "groups updated in 6 steps" in caplog.text
    patterns = SelectiveUpdateCallback(top_k=1, groups=["q_proj.weight"])
    trained(cases.build("llama"), tmp_path, [patterns])
    assert set(patterns.members) == {"q_proj.weight", REST}


def test_groups_are_of_what_the_optimizer_trains(tmp_path):
    """The largest gradient of a parameter that no optimizer holds would take the place of one that can move."""
    model = cases.build("llama")
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "layers.2" in name], lr=0.1)
    with attached(SelectiveUpdateCallback(top_k=1), model, optimizer) as callback:
        before = weights(model)
        model(**batch()).loss.backward()
        optimizer.step()
    assert set(callback.members) == {"model.layers.2"} == groups_that_moved(callback, before, model)
    callback = SelectiveUpdateCallback(top_k=1, groups=["*.layers.0.*"])
    with pytest.raises(ValueError, match=r"layers\.0\.\*' of groups matches no parameter that the optimizer trains"):
        callback.start(model, optimizer)


def test_what_is_unfrozen_on_the_way_joins_a_group():
    model = cases.build("llama")
    model.model.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(SelectiveUpdateCallback(top_k=1), model, optimizer) as callback:
        for step in range(4):
            model.model.layers[0].requires_grad_(step > 1)
            before = weights(model)
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert groups_that_moved(callback, before, model) == set(callback.chosen)
            assert ("model.layers.0" in callback.members) == (step > 1)
            assert len(callback.chosen) == 1


def test_a_report_of_other_groups_counts_its_own(tmp_path):
    kept = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    trained(cases.build("llama"), tmp_path, [SelectiveUpdateCallback(top_k=2)], **kept)
    callback = SelectiveUpdateCallback(top_k=1, groups="matrix")
    trained(cases.build("llama"), tmp_path, [callback], resume=str(tmp_path / "checkpoint-3"))
    assert set(callback.counts) <= set(callback.members)
    assert f"{len(callback.members) - len(callback.counts)} groups were never updated" in callback.summary()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass one of the two"),
        ({"top_k": 1, "fraction": 0.5}, "pass one of the two"),
        ({"top_k": 0}, "top_k must be a whole number >= 1, got 0"),
        ({"fraction": 0.0}, "got 0.0"),
        ({"top_k": 1, "every": 0}, "every must be a whole number >= 1"),
        ({"top_k": 1, "groups": "layer"}, "groups='layer'"),
        ({"top_k": 1, "groups": ["nowhere"]}, "'nowhere' of groups matches no parameter"),
        ({"top_k": 9}, "top_k=9 of 4 groups"),
    ],
)
def test_selective_arguments_out_of_range_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trained(cases.build("llama"), tmp_path, [SelectiveUpdateCallback(**options)])


def test_one_synchronisation_a_choice():
    model = cases.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with attached(SelectiveUpdateCallback(top_k=1, every=2), model, optimizer) as callback:
        model(**batch()).loss.backward()
        for number, expected in ((1, 1), (2, 0), (3, 1)):
            callback.step = number
            model(**batch()).loss.backward()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                callback.before_step()
            events = [event.name for event in profile.events()]
            assert events.count("aten::topk") == expected
            assert events.count("aten::_foreach_norm") == expected
            assert not {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"} & set(events)


def test_spikes_are_cut_to_the_edge_and_the_rest_is_left():
    generator = torch.Generator().manual_seed(0)
    gradient, v = torch.randn(50, 4, generator=generator), torch.rand(50, 4, generator=generator)
    v[3, 1] = 0
    expected = gradient.double().clone()
    edge = (2.0 * v.double()).sqrt()
    outside = (expected**2 > 2.0 * v.double()) & (v > 0)
    expected[outside] = (edge * expected.sign())[outside]
    clip_spikes(gradient, v, threshold=2.0)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=0)
    assert outside.any()


@pytest.mark.parametrize("in_group", [False, True])
def test_a_step_that_is_a_number_is_reset_too(in_group):
    """As optimizers of one's own count, in the state or in the group: v would be corrected for steps that it forgot."""

    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"betas": (0.9, 0.999)} | ({"step": 0} if in_group else {}))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                        state |= {} if in_group else {"step": 0}
                    (group if in_group else state)["step"] += 1
                    state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)

    layer = torch.nn.Linear(1, 1, bias=False)
    optimizer = Own(layer.parameters())
    counts = []
    with attached(SpikeAwareClip(warmup=2, reset_every=4), layer, optimizer):
        for _ in range(6):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
            counts.append((optimizer.param_groups[0] if in_group else optimizer.state[layer.weight])["step"])
    assert counts == [1, 2, 3, 4, 1, 2]


def test_clipping_waits_for_v_and_resets_begin_anew():
    layer = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0, betas=(0.9, 0.999))
    seen, counts = [], []
    with attached(SpikeAwareClip(threshold=1.0, warmup=3, reset_every=6), layer, optimizer):
        for _ in range(14):
            layer.weight.grad = torch.ones_like(layer.weight)  # v stays far below 1: a spike at every step
            optimizer.step()
            seen.append(float(layer.weight.grad) < 1)
            counts.append(int(optimizer.state[layer.weight]["step"]))
    assert seen == [False, False, False, True, True, True] * 2 + [False, False]
    assert counts == [1, 2, 3, 4, 5, 6] * 2 + [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "got 0.0"),
        ({"warmup": 0}, "warmup must be a whole number >= 1"),
        ({"warmup": 10, "reset_every": 10}, "reset_every=10 is within warmup=10"),
    ],
)
def test_spike_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SpikeAwareClip(**options)


def test_a_reset_begins_nadam_anew():
    """Its bias correction is a product over the steps, without which the first steps after a reset are too small."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    with attached(SpikeAwareClip(warmup=1, reset_every=3), model, optimizer):
        for _ in range(4):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
    fresh = torch.optim.NAdam(model.parameters(), lr=0.1)
    fresh.step()
    for parameter in model.parameters():
        assert optimizer.state[parameter]["step"] == 1
        assert torch.equal(optimizer.state[parameter]["mu_product"], fresh.state[parameter]["mu_product"])


def test_spikes_need_a_second_moment(tmp_path):
    with pytest.raises(ValueError, match="SGD keeps none"):
        trained(cases.build("llama"), tmp_path, [SpikeAwareClip()], optim="sgd")


def test_what_never_trained_has_no_state_to_prune_by(tmp_path):
    callbacks = [SelectiveUpdateCallback(top_k=1, every=9), StatePruningCallback(0.5, begin_step=2, end_step=2)]
    with pytest.raises(ValueError, match="has no state for"):
        trained(cases.build("llama"), tmp_path, callbacks)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_are_scaled_are_clipped_as_others(fused):
    """A GradScaler hands a fused optimizer gradients that are still scaled."""
    weights = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=2.0**16), torch.amp.GradScaler("cpu", enabled=False)):
        layer = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.ones_(layer.weight)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=fused)
        generator = torch.Generator().manual_seed(0)
        with attached(SpikeAwareClip(threshold=2.0, warmup=2, reset_every=None), layer, optimizer):
            for step in range(6):
                x = torch.randn(4, 8, generator=generator) * (100 if step == 4 else 1)
                scaler.scale(layer(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        weights.append(layer.weight.detach())
    torch.testing.assert_close(*weights)


def test_a_second_moment_of_another_kind_is_refused_at_the_first_step():
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adamax(layer.parameters())
    with attached(SpikeAwareClip(), layer, optimizer):
        layer(torch.ones(4)).sum().backward()
        with pytest.raises(ValueError, match=r"'exp_avg_sq'.*Adamax keeps 'step', 'exp_avg', 'exp_inf'"):
            optimizer.step()
    with pytest.raises(ValueError, match="Adamax keeps"), attached(SpikeAwareClip(), layer, optimizer):
        pytest.fail("its state is there when training begins")


def test_a_choice_that_is_not_beside_the_checkpoint_is_told(tmp_path, caplog):
    """A Trainer tells callbacks of its own folder alone: one that is resumed from another has its files elsewhere."""
    first = SelectiveUpdateCallback(top_k=1, every=4)
    trained(cases.build("llama"), tmp_path / "one", [first], max_steps=3, save_strategy="steps", save_steps=3)
    with caplog.at_level(logging.WARNING):
        again = SelectiveUpdateCallback(top_k=1, every=4)
        trained(cases.build("llama"), tmp_path / "two", [again], resume=str(tmp_path / "one" / "checkpoint-3"))
    assert "has no choice of this callback" in caplog.text


def test_gradients_that_are_no_numbers_choose_nothing():
    """A Trainer tells of steps that its GradScaler skips, the first as a rule: any groups trained for `every` steps."""
    model = cases.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    callback = SelectiveUpdateCallback(top_k=1, every=5)
    callback.start(model, optimizer)
    for callback.step, factor in ((1, float("inf")), (2, 1.0)):
        (model(**batch()).loss * factor).backward()
        norms = {
            label: sum(float(p.grad.double().square().sum()) for p in parameters)
            for label, parameters in callback.members.items()
        }
        callback.before_step()
        if callback.step == 1:
            assert not callback.chosen
            assert all(one.grad is not None for one in model.parameters()), "left to the scaler, which skips the step"
        optimizer.zero_grad()
    callback.finish()
    assert callback.chosen == [max(norms, key=norms.get)]
    assert callback.counts == {callback.chosen[0]: 1}


def test_steps_that_are_counted_elsewhere_cannot_be_reset():
    """Schedule-free optimizers count in their groups, as `k`: steps behind a reset were 20 times as large."""

    class CountsElsewhere(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                for one in group["params"]:
                    self.state[one].setdefault("exp_avg_sq", torch.zeros_like(one)).lerp_(one.grad.square(), 0.1)

    layer = torch.nn.Linear(4, 4)
    optimizer = CountsElsewhere(layer.parameters())
    optimizer.defaults["betas"] = (0.9, 0.999)
    for clip, refused in ((SpikeAwareClip(reset_every=None), False), (SpikeAwareClip(), True)):
        optimizer.state.clear()
        with attached(clip, layer, optimizer):
            layer(torch.ones(4)).sum().backward()
            if not refused:
                optimizer.step()
                continue
            with pytest.raises(ValueError, match=r"where CountsElsewhere counts is not known.*reset_every=None"):
                optimizer.step()
