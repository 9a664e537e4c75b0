"""Pruning from the optimizer's state: the schedule, the saliencies against their formulas, and exact budgets."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer, TrainerCallback

from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.training import SpikeAwareClip, StatePruningCallback, attached
from gradprobe_hf.training.optimizer_state import EPSILON, check_state, mean_root, steps_of_state
from gradprobe_hf.training.saliency import MOMENTS, SALIENCIES, nonnegative
from gradprobe_hf.training.state_pruning import SCHEDULES
from tests import cases
from tests.grids import grid
from tests.trainers import Rows, arguments, half_pruned, trained, trained_to_its_best, weights

FORMULAS = {
    "magnitude": lambda w, m, v, e: np.abs(w),
    "fourth-root": lambda w, m, v, e: np.abs(w) * v**0.25,
    "momentum": lambda w, m, v, e: np.abs(w) * np.sqrt(np.abs(m)),
    "gradient-product": lambda w, m, v, e: np.abs(w * m) * np.abs(w) / (np.sqrt(v) + e),
    "signal-to-noise": lambda w, m, v, e: np.abs(w) * np.sqrt(np.abs(m)) * np.abs(m) / (np.sqrt(v) + e),
    "movement": lambda w, m, v, e: -w * m / (np.sqrt(v) + e),
    "state-fisher": lambda w, m, v, e: w**2 * v,
}


def test_every_saliency_orders_weights_as_its_formula_in_float64():
    assert set(FORMULAS) == set(SALIENCIES)
    generator = torch.Generator().manual_seed(0)
    w, m = (torch.randn(4000, generator=generator) * scale for scale in (2e-2, 1e-5))
    v = torch.rand(4000, generator=generator).square() * 5e-10  # the scale that fine-tuning has
    epsilon = EPSILON * mean_root(v[None])
    for name, (saliency, taken) in SALIENCIES.items():
        given_values = {"m": m, "v": v, "epsilon": epsilon}
        found = saliency(w, **{key: given_values[key] for key in taken})
        assert found.ge(0).all(), name
        exact = FORMULAS[name](*(part.double().numpy() for part in (w, m, v, epsilon)))
        ranks = np.argsort(np.argsort(exact)) - np.argsort(np.argsort(found.numpy()))
        assert np.abs(ranks).max() <= 2, name  # float32 may swap neighbours that differ in the last bit


def test_an_absolute_epsilon_would_turn_a_saliency_into_another():
    """What the module's docstring warns of: where v is small, 1e-8 takes its place."""
    generator = torch.Generator().manual_seed(0)
    w, m = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator) * 1e-9
    v = torch.rand(1000, generator=generator) * 1e-18
    rule = SALIENCIES["gradient-product"][0]
    relative = rule(w, m, v, EPSILON * mean_root(v[None])).argsort().argsort()
    exact = rule(w.double(), m.double(), v.double(), torch.tensor(0.0)).argsort().argsort()
    swamped = rule(w, m, v, torch.tensor(1e-8)).argsort().argsort()
    assert (relative - exact).abs().max() <= 2
    assert (swamped - exact).abs().float().mean() > 20


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=30))
def test_nonnegative_keeps_the_order(values):
    signed = torch.tensor(values, dtype=torch.float32).sort().values
    found = nonnegative(signed)
    assert found.ge(0).all()
    assert found.isfinite().all()
    assert found.diff().ge(0).all()


def test_nonnegative_keeps_nan():
    assert nonnegative(torch.tensor([1.0, torch.nan])).isnan().tolist() == [False, True]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_begin_and_end_where_they_say(schedule):
    callback = StatePruningCallback(0.9, begin_step=10, end_step=50, schedule=schedule, initial_sparsity=0.3)
    values = [callback.sparsity_at(step) for step in range(10, 51)]
    assert values[0] == 0.3
    assert values[-1] == 0.9
    assert values == sorted(values)


def test_the_two_directions_of_the_cubic():
    early = StatePruningCallback(0.8, begin_step=1, end_step=101, schedule="cubic")
    late = StatePruningCallback(0.8, begin_step=1, end_step=101, schedule="late-cubic")
    assert early.sparsity_at(51) == pytest.approx(0.8 * (1 - 0.5**3))  # Zhu & Gupta, eq. 1
    assert late.sparsity_at(51) == pytest.approx(0.8 * 0.5**3)


def pruned_by_hand(model, optimizer, saliency, sparsity):
    """All scores in one list, float64, sorted."""
    scores, total = [], 0
    for target in find_targets(model):
        w = target.matrix(model).double().numpy()
        state = optimizer.state[model.get_parameter(target.parameter)]
        m, v = (target.view(state[name]).double().numpy() for name in MOMENTS.values())
        score = FORMULAS[saliency](w, m, v, EPSILON * np.sqrt(v).mean())
        score[w == 0] = -np.inf
        scores.append(score.ravel())
        total += w.size
    order = np.argsort(np.concatenate(scores), kind="stable")
    mask = np.zeros(total, dtype=bool)
    mask[order[: round(sparsity * total)]] = True
    return mask


@grid("saliency, name", list(SALIENCIES), ["llama", "gpt2"])
def test_an_update_prunes_what_sorting_all_scores_would(saliency, name):
    model = cases.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {key: value[None] for key, value in Rows()[0].items()}

    class Looking(StatePruningCallback):
        def update(self):
            self.expected = pruned_by_hand(model, optimizer, saliency, 0.6)
            super().update()

    callback = Looking(0.6, saliency=saliency, begin_step=3, end_step=3)
    with attached(callback, model, optimizer):
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    mask = np.concatenate([callback.keeper.masks[t.name].numpy().ravel() for t in find_targets(model)])
    assert mask.sum() == callback.expected.sum()
    assert (mask == callback.expected).mean() > 0.999  # float32 against float64 at the cut
    assert all(not t.matrix(model)[callback.keeper.masks[t.name]].any() for t in find_targets(model))


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_fixed_target_is_met_to_the_element_every_time(scope):
    """No ratchet: weights that were pruned are in the running again, and the count stays."""
    model = cases.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = {key: value[None] for key, value in Rows()[0].items()}
    masks = []

    class Keeping(StatePruningCallback):
        def update(self):
            super().update()
            masks.append(torch.cat([(t.matrix(model) == 0).flatten() for t in find_targets(model)]))

    callback = Keeping(0.5, begin_step=1, end_step=41, every=1, initial_sparsity=0.5, scope=scope)
    with attached(callback, model, optimizer):
        for _ in range(43):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    targets = find_targets(model)
    exact = round(0.5 * sum(t.numel for t in targets))
    if scope == "tensor":
        exact = sum(round(0.5 * t.numel) for t in targets)
    assert [update.zeros for update in callback.history] == [exact] * 41
    assert {int(mask.sum()) for mask in masks} == {exact}
    assert (masks[0] & ~masks[-1]).any(), "some weights have come back"
    assert torch.equal(masks[-1], torch.cat([(t.matrix(model) == 0).flatten() for t in targets])), "and then none"


@pytest.mark.parametrize(
    "build",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False, amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
        lambda parameters: torch.optim.RAdam(parameters, lr=1e-3),
    ],
    ids=["fused", "foreach", "amsgrad", "Adam", "NAdam", "RAdam"],
)
def test_the_adam_family_is_read(build):
    model = cases.build("llama")
    optimizer = build(model.parameters())
    batch = {key: value[None] for key, value in Rows()[0].items()}
    with attached(StatePruningCallback(0.5, begin_step=2, end_step=2), model, optimizer) as callback:
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
    assert callback.history[0].zeros == round(0.5 * callback.history[0].weights)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_what_a_trainer_builds_is_read(optim, tmp_path):
    model = cases.build("llama")
    callback = StatePruningCallback(0.5, begin_step=1, end_step=5, every=2)
    trained(model, tmp_path, [callback], optim=optim)
    assert [update.step for update in callback.history] == [1, 3, 5]
    assert sum(int((t.matrix(model) == 0).sum()) for t in find_targets(model)) == callback.keeper.zeros


def test_state_that_is_not_there_is_named(tmp_path):
    model = cases.build("llama")
    with pytest.raises(ValueError, match=r"'exp_avg'.*SGD does not keep"):
        trained(model, tmp_path, [StatePruningCallback(0.5)], optim="sgd")
    with pytest.raises(ValueError, match=r"'exp_avg'.*Adafactor"):
        trained(model, tmp_path, [StatePruningCallback(0.5, begin_step=1)], optim="adafactor")
    trained(model, tmp_path, [StatePruningCallback(0.5, "magnitude", end_step=3)], optim="sgd")
    optimizer = torch.optim.AdamW(model.parameters())
    callback = StatePruningCallback(0.5)
    with attached(callback, model, optimizer):
        callback.step = 1
        before = weights(model)
        with pytest.raises(ValueError, match=r"AdamW has no state for model.layers.0\S+ yet: its state is empty"):
            callback.update()
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_sparsity": 1.0}, "got 1.0"),
        ({"target_sparsity": 0.5, "saliency": "fisher"}, "saliency='fisher' is not known"),
        ({"target_sparsity": 0.5, "schedule": "cosine"}, "schedule='cosine'"),
        ({"target_sparsity": 0.5, "scope": "row"}, "scope='row'"),
        ({"target_sparsity": 0.5, "begin_step": 9, "end_step": 3}, "begin_step=9 and end_step=3"),
        ({"target_sparsity": 0.5, "every": 0}, "every must be a whole number >= 1"),
        ({"target_sparsity": 0.5, "initial_sparsity": 0.6}, "initial_sparsity=0.6"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StatePruningCallback(**options)


def test_a_saliency_that_is_magnitude_in_disguise_is_reported(caplog):
    model = cases.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    batch = {key: value[None] for key, value in Rows()[0].items()}
    callback = StatePruningCallback(0.5, "state-fisher", begin_step=1, end_step=1)
    with caplog.at_level(logging.WARNING), attached(callback, model, optimizer):
        model(**batch).loss.backward()
        optimizer.step()
    assert 0 < callback.history[-1].magnitude_overlap < 0.97
    assert "magnitude" not in caplog.text
    again = StatePruningCallback(0.5, "state-fisher", begin_step=1, end_step=1)
    model.load_state_dict(cases.build("llama").state_dict())  # without zeros, which it would begin with
    for state in optimizer.state.values():
        state["exp_avg_sq"].fill_(1.0)
    with caplog.at_level(logging.WARNING), attached(again, model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # so that v is flat after the step, too
        optimizer.step()
    assert again.history[-1].magnitude_overlap > 0.97
    assert "prunes" in caplog.text


def test_an_end_before_the_schedule_is_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trained(cases.build("llama"), tmp_path, [StatePruningCallback(0.5, end_step=100)])
    assert "before end_step=100" in caplog.text


def test_a_best_model_from_before_the_mask_is_reported(tmp_path, caplog):
    callback = StatePruningCallback(0.95, begin_step=6, end_step=6)
    with caplog.at_level(logging.WARNING):
        trainer = trained_to_its_best(cases.build("llama"), tmp_path, [callback])
    assert trainer.state.best_global_step < 6
    assert "put back a checkpoint from before end_step=6" in caplog.text


def test_matrices_that_do_not_train_are_refused_when_training_begins(tmp_path):
    model = cases.build("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    with pytest.raises(ValueError, match=r"do not train .*layers\.0\.mlp.*exclude"):
        trained(model, tmp_path, [callback := StatePruningCallback(0.5, begin_step=5, end_step=6)])
    assert callback.step == 0
    for one in (
        StatePruningCallback(0.5, begin_step=1, end_step=3, exclude=["model.layers.0.mlp.*"]),
        StatePruningCallback(0.5, "magnitude", begin_step=1, end_step=3),
    ):
        trained(model, tmp_path, [one], max_steps=3)
        assert one.history[-1].sparsity == 0.5


def test_state_of_another_kind_is_told_at_the_first_step():
    """Two decay rates promise moments; 8-bit optimizers keep them in a form of their own."""
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4)])})
    optimizer = torch.optim.Adamax(layers.parameters())
    with attached(StatePruningCallback(0.5, "state-fisher", begin_step=50), layers, optimizer):
        layers["layers"][0](torch.ones(4)).sum().backward()
        with pytest.raises(ValueError, match=r"'exp_avg_sq'.*Adamax does not keep"):
            optimizer.step()


def test_an_end_beyond_the_run_is_told_when_it_begins(tmp_path, caplog):
    class Told(TrainerCallback):
        def on_step_begin(self, *_, **__):
            assert "end_step=100 is beyond the 6 steps of this run" in caplog.text

    with caplog.at_level(logging.WARNING):
        trained(cases.build("llama"), tmp_path, [StatePruningCallback(0.5, end_step=100), Told()])
    assert caplog.text.count("is beyond the") == 1
    caplog.clear()
    trained(cases.build("llama"), tmp_path, [StatePruningCallback(0.5, end_step=6)])
    assert "is beyond the" not in caplog.text


def test_an_optimizer_with_a_second_copy_of_the_weights_is_refused(tmp_path):
    class ScheduleFree(torch.optim.AdamW):  # as Trainer tells them
        def train(self): ...

        def eval(self): ...

    model = cases.build("llama")
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=Rows(),
        callbacks=[StatePruningCallback(0.5, end_step=3)],
        optimizers=(ScheduleFree(model.parameters()), None),
    )
    with pytest.raises(ValueError, match="ScheduleFree keeps a second copy of the weights"):
        trainer.train()


@pytest.mark.parametrize(
    ("saliency", "updated"), [("momentum", [2, 4, 16]), ("magnitude", [2, 4, 6, 8, 10, 12, 14, 16])]
)
def test_moments_that_were_just_reset_choose_nothing(saliency, updated, tmp_path):
    """Before steps 6, 11 and 16 here: no moment has seen ten steps again, and the last choice is made all the same."""
    callback = StatePruningCallback(0.5, saliency, begin_step=2, end_step=16, every=2)
    trained(cases.build("llama"), tmp_path, [SpikeAwareClip(warmup=1, reset_every=5), callback], max_steps=16)
    assert [update.step for update in callback.history] == updated


def test_an_update_waits_until_moments_know_enough_and_a_resumed_run_knows_of_it(tmp_path, caplog):
    def callbacks():
        return [
            SpikeAwareClip(warmup=1, reset_every=20),
            StatePruningCallback(0.5, begin_step=1, end_step=40, every=10),
        ]

    kept = {"save_strategy": "steps", "save_steps": 25}
    whole, first, second = callbacks(), callbacks(), callbacks()
    models = [cases.build("llama") for _ in range(3)]
    trained(models[0], tmp_path / "whole", whole, max_steps=40, **kept)
    assert [update.step for update in whole[1].history] == [1, 11, 30, 31, 40]
    trained(models[1], tmp_path / "parts", first, max_steps=25, **kept)
    trained(models[2], tmp_path / "parts", second, str(tmp_path / "parts" / "checkpoint-25"), max_steps=40, **kept)
    steps = [(update.step, update.zeros, update.magnitude_overlap) for update in whole[1].history]
    assert [(update.step, update.zeros, update.magnitude_overlap) for update in second[1].history] == steps
    assert all(torch.equal(value, weights(models[2])[name]) for name, value in weights(models[0]).items())
    assert "of less than 10 steps" not in caplog.text
    late = StatePruningCallback(0.5, begin_step=1, end_step=22, every=10)
    trained(cases.build("llama"), tmp_path / "late", [SpikeAwareClip(warmup=1, reset_every=20), late], max_steps=24)
    assert "of less than 10 steps before end_step=22" in caplog.text
    assert [update.step for update in late.history] == [1, 11, 22]
    assert late.keeper.nonzero() == 0


class Elsewhere(torch.Tensor):
    """A count on a device of its own, as far as a machine without one can tell."""

    device = torch.device("cuda:1")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.stack and not all(isinstance(one, cls) for one in args[0]):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs)


def test_an_update_waits_for_a_first_step_that_a_scaler_skips():
    """In fp16 a Trainer tells of a step although its GradScaler has left it out, as it does until its scale fits."""
    model = cases.build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(StatePruningCallback(0.5, initial_sparsity=0.2, end_step=20), model, optimizer) as callback:
        callback.step = 1
        callback.after_step()
        assert callback.history == []
        for row in range(10):  # from then on as after a reset
            model(**{key: value[None] for key, value in Rows()[row].items()}).loss.backward()
            optimizer.step()
        assert [update.step for update in callback.history] == [11]


def test_steps_are_counted_over_all_devices():
    """A fused optimizer of a model on several devices counts on each of them."""
    one, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([one, other])
    assert steps_of_state(optimizer, otherwise=5) == 5
    optimizer.state[one]["step"] = torch.tensor(3.0)
    optimizer.state[other]["step"] = torch.tensor(4.0).as_subclass(Elsewhere)
    assert steps_of_state(optimizer, otherwise=5) == 4
    optimizer.state[one]["step"] = 7  # as some count
    assert steps_of_state(optimizer, otherwise=5) == 7


def test_one_update_has_a_sparsity_before_it():
    callback = StatePruningCallback(0.8, begin_step=10, end_step=10)
    assert [callback.sparsity_at(step) for step in (5, 10, 20)] == [0.0, 0.8, 0.8]


class Counting(TrainerCallback):
    """Zeros of the targets after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(sum(int((target.matrix(model) == 0).sum()) for target in find_targets(model)))


def test_a_sparse_model_begins_with_its_zeros(tmp_path, caplog):
    model, masks = half_pruned()
    half, total = (sum(count(mask) for mask in masks.values()) for count in (torch.sum, torch.numel))
    counting, callback = Counting(), StatePruningCallback(0.75, begin_step=3, end_step=5, every=2, schedule="linear")
    with caplog.at_level(logging.WARNING):
        trained(model, tmp_path, [callback, counting], save_strategy="steps", save_steps=4)
    assert counting.seen[:3] == [half] * 3
    assert counting.seen[4:] == [round(0.75 * total)] * 2
    assert [update.sparsity for update in callback.history] == [int(half) / total, 0.75]
    assert callback.history[0].magnitude_overlap is None
    assert "changed next to nothing" not in caplog.text
    again = StatePruningCallback(0.75, begin_step=3, end_step=7, every=2, schedule="linear")
    resume = str(tmp_path / "checkpoint-4")
    trained(model, tmp_path, [again], resume=resume, save_strategy="steps", save_steps=4)
    assert again.history[-1].sparsity == pytest.approx((int(half) / total + 0.75) / 2)


def test_more_zeros_than_the_target_are_refused(tmp_path):
    model, _ = half_pruned()
    with pytest.raises(ValueError, match=r"50\.0% of the weights are zero already.*target_sparsity=0\.3"):
        trained(model, tmp_path, [StatePruningCallback(0.3, end_step=4)])
    model = cases.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()  # as it may be made: it has yet to learn
    trained(model, tmp_path, [StatePruningCallback(0.1, begin_step=5, end_step=6)])
    assert model.model.layers[0].mlp.down_proj.weight.any()


def asked_for(sparsity, **more):
    return StatePruningCallback(sparsity, **{"begin_step": 1, "end_step": 3, "every": 1, **more})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (asked_for(0.3), r"target_sparsity=0\.3 with scope='global' asks for [\d,]+ zeros where it has"),
        (asked_for(0.7), r"target_sparsity=0\.7 .* to prune further, load the checkpoint's model"),
        (asked_for(0.5, scope="tensor"), "with scope='tensor' asks for"),
        (asked_for(0.5, exclude=["*.mlp.*"]), r"choose other matrices \(.*mlp"),
        (asked_for(0.5, end_step=6), "end_step=6 comes after its step 4"),
    ],
    ids=["less", "more", "scope", "matrices", "later"],
)
def test_a_frozen_mask_is_of_the_arguments_that_chose_it(other, message, tmp_path):
    kept = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trained(cases.build("llama"), tmp_path, [asked_for(0.5)], **kept)
    with pytest.raises(ValueError, match=message):
        trained(cases.build("llama"), tmp_path, [other], resume=str(tmp_path / "checkpoint-4"))


def test_a_run_resumed_beyond_a_nearer_end_is_pruned_to_its_target(tmp_path, caplog):
    """Between two updates pruned weights grow back: the zeros of the checkpoint are no mask."""
    kept = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5}
    trained(cases.build("llama"), tmp_path, [asked_for(0.5, end_step=40, every=3)], **kept)
    model, callback = cases.build("llama"), asked_for(0.5, end_step=4)
    with caplog.at_level(logging.WARNING):
        trained(model, tmp_path, [callback], resume=str(tmp_path / "checkpoint-5"), max_steps=8)
    assert "checkpoint-5 is of step 5, and not pruned to target_sparsity=0.5 yet" in caplog.text
    assert [(update.step, update.sparsity) for update in callback.history] == [
        (1, 0.0),
        (4, pytest.approx(0.106, abs=0.01)),
        (6, 0.5),
    ]
    targets = find_targets(model)
    zeros = sum(int((target.matrix(model) == 0).sum()) for target in targets)
    assert zeros == callback.keeper.zeros == round(0.5 * sum(target.numel for target in targets))


def test_a_resumed_run_brings_no_weight_back(tmp_path):
    kept = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5}
    trained(cases.build("llama"), tmp_path, [asked_for(0.8, end_step=7)], **kept)
    with pytest.raises(ValueError, match=r"checkpoint-5 has been pruned to .*target_sparsity=0\.3 would bring some"):
        trained(cases.build("llama"), tmp_path, [asked_for(0.3, end_step=7)], resume=str(tmp_path / "checkpoint-5"))


@pytest.mark.parametrize("later", [{"end_step": 40}, {"begin_step": 8, "end_step": 12}], ids=str)
def test_a_longer_schedule_waits_at_what_was_reached(later, tmp_path):
    kept = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5}
    trained(cases.build("llama"), tmp_path, [first := asked_for(0.8, end_step=7)], **kept)
    reached, again = first.history[-1], asked_for(0.8, **later)
    trained(cases.build("llama"), tmp_path, [again], resume=str(tmp_path / "checkpoint-5"), max_steps=12)
    updates = [one for one in again.history if one.step > 5]
    assert updates[0].zeros == reached.zeros > 0
    assert [one.sparsity for one in updates] == sorted(one.sparsity for one in updates)
    assert updates[-1].sparsity == again.sparsity_at(12) >= reached.sparsity


def test_codes_of_moments_are_no_moments():
    """Of a quantised optimizer under torch's names: 127 may mean zero there, and the weights went by it."""
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    codes = torch.full((4, 4), 127, dtype=torch.uint8)
    optimizer.state[layer.weight] = {"step": 1, "exp_avg": codes, "exp_avg_sq": codes}
    with pytest.raises(ValueError, match=r"'momentum' reads .*AdamW keeps codes \(torch.uint8\)"):
        check_state(optimizer, "momentum")


def test_moments_of_a_projection_are_none_of_each_weight():
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.state[layer.weight] = {"step": 1, "exp_avg": torch.ones(2, 4), "exp_avg_sq": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=r"'state-fisher' reads .*AdamW keeps one \[2, 4\] of a parameter \[4, 4\]"):
        check_state(optimizer, "state-fisher")
    with (
        pytest.raises(ValueError, match=r"SpikeAwareClip reads a moment of each weight"),
        attached(SpikeAwareClip(), layer, optimizer),
    ):
        pytest.fail("its state is there when training begins")
