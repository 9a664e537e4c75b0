"""The estimate of a recovery against what it estimates: hand arithmetic, and real steps watched on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradprobe_hf.cli import main
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.estimation import recovery
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.notes import _remedy
from gradprobe_hf.estimation.sizes import sizes_of
from gradprobe_hf.estimation.watch import Watch
from gradprobe_hf.model.families import sample_batch
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.passes import upcast
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.recovery.teacher import LiveTeacher
from gradprobe_hf.recovery.text import COUNTED, Layout
from gradprobe_hf.recovery.trainer import RecoveryTrainer, training_arguments
from gradprobe_hf.runtime.processes import Processes
from tests import cases
from tests.test_estimation import LAYERS, large

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "llama_bfloat16", "gpt2", "bert", "t5", "vit"])
def test_a_step_of_recovery_is_the_real_one(name, tmp_path, monkeypatch):
    """The trainer's own loss and its gradients on the CPU, with the dense model beside, in its own autocast."""
    monkeypatch.setattr(upcast, "needs_upcast", lambda _: False)  # whatever CPU this is
    name, narrow = name.removesuffix("_bfloat16"), name.endswith("_bfloat16")
    dense, student, length = cases.build(name), cases.build(name).requires_grad_(), 48
    if narrow:
        dense.to(torch.bfloat16)
    without = skeleton(dense.config, type(dense), dense.dtype)
    batch = dict(sample_batch(dense, 8, length))
    if "input_ids" in batch:
        batch["input_ids"] = torch.randint(3, 60, (8, length), generator=torch.Generator().manual_seed(0))
    else:
        batch["pixel_values"] = torch.rand(batch["pixel_values"].shape)
    labels = torch.ones(batch.get("labels", batch.get("input_ids")).shape, dtype=torch.long)
    batch = {**batch, "labels": labels, COUNTED: labels}
    layout = Layout(name in ("llama", "gpt2"), name == "t5", call={})
    arguments = training_arguments(RecoveryConfig(), tmp_path, processes=Processes(), saves=False, on_cpu=True)
    teacher = LiveTeacher(dense, layout)
    trainer = RecoveryTrainer(student, arguments, teacher, Processes(), layout=layout, bf16=narrow, eval_dataset=[0])
    given = [*dense.parameters(), *dense.buffers(), *student.parameters(), *student.buffers(), *batch.values()]
    with Watch(given) as watch:
        trainer.compute_loss(student, batch).backward()
    config = cases.config(recovery_steps=20, sequence_length=length)
    found = estimate(without, find_targets(without), config, device=CPU)
    step = found.recovery
    assert step.simulated
    assert step.sizes.step == pytest.approx(watch.peak, rel=0.1)
    assert step.sizes.states == 12 * dense.num_parameters()
    # Twenty steps, and before them, behind every second one and at the end the 32 held-out rows, without gradients, by
    # two models.
    held_out = 12 * 32 / 8 / 2
    assert step.flops == pytest.approx(watch.flops * (20 + held_out), rel=0.02)
    assert [one.name for one in found.placements] == ["resident", "checkpointed"], "what is offloaded is not trained"
    for one in found.placements:
        (stage,) = [stage for stage in one.stages if stage.name == "recover"]
        assert stage.bytes_on("host") >= step.sizes.step + step.sizes.states


def test_without_recovery_none_is_counted():
    model = cases.build("llama")
    found = estimate(skeleton(model.config, type(model)), find_targets(model), cases.config(), device=CPU)
    assert found.recovery is None
    assert not any(stage.name == "recover" for one in found.placements for stage in one.stages)


@pytest.mark.parametrize(("snapshots", "bytes_each"), [(False, 2 * 4), (True, 4 + 2 * 12)])
def test_the_state_of_a_recovery_is_written_to_disk(snapshots, bytes_each):
    """As much as a run that has no room for it is refused for (tests/test_recovery_resumed.py)."""
    model = cases.build("llama")
    meta = skeleton(model.config, type(model))
    config = cases.config(recovery_steps=200, sequence_length=16)
    found = estimate(meta, find_targets(model), config, device=CPU, snapshots=snapshots)
    for one in found.placements:
        (item,) = [item for item in one.stages[-1].items if item.label == "state of the recovery"]
        assert (item.device, item.bytes) == ("disk", bytes_each * model.num_parameters())


def test_a_recovery_that_is_the_highest_point_shows_what_it_holds(checkpoint, capsys):
    assert main(["estimate", str(checkpoint), "--recovery-steps", "20"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    reached = next(number for number, line in enumerate(lines) if line.startswith("reached in stage"))
    assert lines[reached].split()[-1] == "recover"
    assert lines[reached + 1].startswith("new weights")
    assert lines[reached + 2].startswith("the pruned model in float32, two moments")
    assert lines[reached + 3].startswith("its gradients, a step's activations and logits")
    assert sum(line.startswith("weights ") for line in lines) == 1, "what every stage holds is told once"


def test_a_recovery_without_room_is_told_what_would_help():
    model, targets = large("mistral-7b", LAYERS)
    found = estimate(model, targets, cases.config(recovery_steps=20, sequence_length=64), device=CPU)
    (one, *_) = found.placements
    largest_other = max(stage.bytes_on("host") for stage in one.stages if stage.name != "recover")
    short = replace(one, room={"host": largest_other, "disk": 10**15})
    sizes = sizes_of(model, targets, cases.config(), process=0, snapshots=False)
    remedy = _remedy(cases.config(), sizes, short)
    assert "no placement fits the recovery, which takes" in remedy
    assert "--lora-r 16" in remedy
    assert "--batch-size" not in remedy
    probes = replace(short, stages=tuple(stage for stage in one.stages if stage.name == "probe"), room={"host": 1})
    assert "--batch-size 1" in _remedy(cases.config(accumulator_device="disk"), sizes, probes)


def test_a_step_that_needs_data_gets_a_formula(monkeypatch):
    model, targets = large("mistral-7b", LAYERS)  # its head is a small part of it
    config = cases.config(recovery_steps=20, sequence_length=512)
    known = estimate(model, targets, config, device=CPU).recovery
    monkeypatch.setattr(recovery, "WholePredictions", None)  # called, it raises
    rough = estimate(model, targets, config, device=CPU).recovery
    assert known.simulated
    assert not rough.simulated
    assert 0.5 < rough.flops / known.flops < 2
    assert 0.5 < rough.sizes.step / known.sizes.step < 2
