"""Profiling a Trainer: planted faults are found with their line, a clean run is silent, processes are compared."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import ProfileKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from gradprobe_hf.profiling import ProfileCallback, ProfileReport, Schedule, profiled
from gradprobe_hf.profiling.observing import ranks
from gradprobe_hf.recovery.trainer import accelerate_kept
from tests import cases, planted, trainers
from tests.launch import together

HERE = Path(__file__)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    planted.forget_compilations()


def llama(attention="sdpa", **more):
    """Large enough that a step takes milliseconds."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_key_value_heads=4, attn_implementation=attention, **cases.CAUSAL, **more)
    return LlamaForCausalLM(config)


class Batches(torch.utils.data.Dataset):
    """Batches that are ready; of 64 tokens a row, some may be padding."""

    def __init__(self, padding=0, sleep=0.0, rows=8):
        ids = torch.randint(0, 256, (rows, 64))
        mask = torch.ones_like(ids)
        mask[:, 64 - padding :] = 0
        self.batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        self.sleep = sleep

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.sleep:  # to sleep for nothing gives up the core
            time.sleep(self.sleep)
        return self.batch


class Faulty(Trainer):
    """All in one step; each on a line with a comment that names it."""

    def compute_loss(self, model, *arguments, **more):
        loss = super().compute_loss(model, *arguments, **more)
        loss.item()  # synchronization
        print(loss)  # print
        torch.triu(torch.ones(32, 32))  # constant tensor
        weight = model.lm_head.weight
        loss = loss + 0 * weight.double().sum().float()  # cast of a weight
        with torch.autocast("cpu", enabled=False):
            return loss + 0 * (weight @ weight.T).sum()  # float32 product

    def training_step(self, *arguments, **more):
        loss = super().training_step(*arguments, **more)
        sum(one.grad.norm() for one in self.model.parameters())  # norms one by one
        return loss


def run(trainer, folder, model, rows, schedule=planted.SHORT, **more):
    callback = ProfileCallback(schedule)
    options = trainers.arguments(
        folder, max_steps=schedule.steps + 1, logging_steps=100, per_device_train_batch_size=1, **more
    )
    found = trainer(model, options, train_dataset=rows, data_collator=lambda rows: rows[0], callbacks=[callback])
    found.train()  # train
    return callback.report()


def line_of(fault):
    lines = HERE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {fault}"))


def test_all_faults_in_a_trainer(tmp_path, capsys):
    # As long as a share that counts of a step where bfloat16 is emulated, too.
    model, rows = llama("eager"), Batches(padding=38, sleep=5e-3)
    report = run(Faulty, tmp_path, model, rows, bf16=True, optim="adamw_torch", gradient_checkpointing=True)
    lines = {(one.kind, one.line) for one in report.findings}
    planted_ones = ["synchronization", "print", "constant tensor", "cast of a weight", "float32 product"]
    assert {(kind, line_of(kind)) for kind in [*planted_ones, "norms one by one"]} <= lines
    trained_at = line_of("train")
    assert {(kind, trained_at) for kind in ("data loading", "padding", "optimizer")} <= lines
    # These happen inside of the model: the line is that which calls it.
    called_at = next(n for n, line in enumerate(HERE.read_text().splitlines(), 1) if "super().compute_loss" in line)
    assert ("eager attention", called_at) in lines
    by_kind = {one.kind: one for one in report.findings}
    assert by_kind["padding"].evidence.startswith("59.4% of the tokens")
    assert "2 layers are computed again" in by_kind["checkpointing"].evidence
    assert 0.02 < by_kind["checkpointing"].share < 0.5
    assert "bfloat16" in by_kind["float32 product"].evidence
    assert "LlamaAttention" in {one.kind for one in report.observation.modules}
    assert "model.layers.*.mlp.down_proj" in {one.name for one in report.observation.modules}


def test_a_clean_trainer_is_silent(tmp_path):
    report = run(Trainer, tmp_path, llama(), Batches(), Schedule(1, 5, 1, 3))
    told = [one for one in report.findings if one.severity != "low"]
    # Rows are made in this process: on a busy machine that is a few per cent of a step of milliseconds.
    assert not [one for one in told if one.kind != "data loading" or one.share > 0.05]
    assert report.observation.setup.attention == {"sdpa": 2}
    assert report.observation.setup.steps_by == "fused"
    assert not report.observation.recomputed


class Few(Batches):
    def __len__(self):
        return 12


@pytest.mark.parametrize("same", [True, False])
def test_evaluations_of_a_trainer_are_in_no_figure(same, tmp_path):
    rows, callback = Few(rows=2), ProfileCallback(Schedule(2, 4, 2, 2))
    options = trainers.arguments(
        tmp_path,
        max_steps=12,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    Trainer(
        llama(),
        options,
        train_dataset=rows,
        eval_dataset=rows if same else Few(rows=3),
        data_collator=lambda rows: rows[0],
        callbacks=[callback],
    ).train()
    seen = callback.report().observation
    assert seen.complete
    assert seen.contents.samples == 2 * seen.contents.steps
    assert sum(one.batches for one in seen.loaders) == len(seen.timed) == 4
    assert seen.evaluations >= 4
    assert {one.name: one.count for one in seen.modules}["(model)"] == seen.located == 2


def test_batches_count_in_the_steps_that_train_on_them(tmp_path):
    """Accelerate's loader fetches one ahead: two in the first step of an epoch, none in its last."""
    callback = ProfileCallback(
        Schedule(3, 4, 1, 2)
    )  # steps 2 and 3, and 9 and 10, are looked into: one begins an epoch
    options = trainers.arguments(tmp_path, max_steps=12, per_device_train_batch_size=4)
    Trainer(llama(), options, train_dataset=trainers.Rows(16), callbacks=[callback]).train()
    found = callback.report().observation.contents
    assert (found.steps, found.samples) == (4, 16)


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(planted.WIDTH)


def dealt():
    """One process loads for both."""
    with accelerate_kept():
        PartialState._reset_state()
        return dealt_by(Accelerator(cpu=True))


def dealt_by(accelerator):
    model = planted.Net()
    model, optimizer, rows = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Streamed(), 3)
    )
    with profiled(schedule=Schedule(2, 2, 1, 1)) as profiler:
        for batch in rows:
            assert len(batch) == 3
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if profiler.done:
                break
    return profiler.report().observation.contents


def test_what_is_loaded_for_all_processes_is_counted_once():
    first, second = together(dealt)
    assert first.samples == 3 * first.steps
    assert second is None  # it has loaded nothing


def test_an_interrupted_trainer_leaves_a_report(tmp_path):
    class Stopped(Trainer):
        def training_step(self, *arguments, **more):
            if self.state.global_step == 4:
                raise KeyboardInterrupt
            return super().training_step(*arguments, **more)

    callback = ProfileCallback(planted.SHORT, save=tmp_path / "report.json")
    trainer = Stopped(
        cases.build("llama"), trainers.arguments(tmp_path), train_dataset=trainers.Rows(), callbacks=[callback]
    )
    with pytest.raises(KeyboardInterrupt), callback:
        trainer.train()
    report = ProfileReport.read(tmp_path / "report.json")
    assert len(report.observation.timed) == 2
    assert not report.observation.complete


@pytest.mark.slow
def test_the_share_of_a_slow_loader_in_a_trainer(tmp_path):
    """Within 10% of what it slept, by a clock of its own."""

    class Slept(Batches):
        seconds = ()

        def __getitem__(self, index):
            start = time.perf_counter()
            batch = super().__getitem__(index)
            self.seconds = (*self.seconds, time.perf_counter() - start)
            return batch

    rows, schedule = Slept(sleep=0.03), Schedule(2, 12, 1, 1)
    report = run(Trainer, tmp_path, llama(), rows, schedule)
    slept = sum(rows.seconds[3:15])  # a Trainer asks for one batch more than it has begun with
    found = next(one for one in report.findings if one.kind == "data loading")
    assert found.share == pytest.approx(slept / sum(report.observation.timed), rel=0.1)
    assert found.line == line_of("train")


def uneven(sleeping):
    """In DDP; one of two processes sleeps before its forward pass."""
    torch.manual_seed(0)
    model = DistributedDataParallel(planted.Net())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profiled(schedule=planted.SHORT) as profiler:
        while not profiler.done:
            if torch.distributed.get_rank() == sleeping:
                time.sleep(0.02)
            model(torch.ones(4, planted.WIDTH)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profiler.report()


def test_processes_are_compared():
    for report in together(uneven, 1):
        by_kind = {one.kind: one for one in report.findings}
        assert "rank 1 takes" in by_kind["imbalance between ranks"].evidence
        assert "the difference is in other" in by_kind["imbalance between ranks"].evidence
        assert by_kind["imbalance between ranks"].share > 0.5
        assert 0 < by_kind["collectives"].share <= 1
        assert [one.rank for one in report.observation.ranks] == [0, 1]


def alone():
    """Only one of two processes is profiled: the other must not be waited for in vain."""
    model = DistributedDataParallel(planted.Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    schedule = Schedule(1, 1, 1, 1)
    if torch.distributed.get_rank() == 0:
        soon = mock.patch.object(ranks, "_PATIENCE", timedelta(seconds=0.2))
        with soon, profiled(schedule=schedule) as profiler:
            for _ in range(4):
                model(torch.ones(4, planted.WIDTH)).mean().backward()
                optimizer.step()
        return profiler.report().not_evaluable
    for _ in range(4):
        model(torch.ones(4, planted.WIDTH)).mean().backward()
        optimizer.step()
    return None


def test_one_process_is_profiled():
    first, _ = together(alone)
    assert first["imbalance between ranks"].startswith("another process told nothing")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graph break", "recompilation"])
def test_compiling_in_a_trainer(kind, tmp_path):
    def scaled(x, by):  # recompilation
        if kind == "graph break" and by > 0:
            print("a break")  # graph break
        return x * by

    compiled = torch.compile(scaled, backend="eager", dynamic=False)

    class Compiles(Trainer):
        count = 0

        def compute_loss(self, *arguments, **more):
            loss = super().compute_loss(*arguments, **more)
            self.count += kind == "recompilation"
            return loss + 0 * compiled(torch.ones(self.count + 2), 2.0).sum()

    torch._dynamo.reset()
    report = run(Compiles, tmp_path, llama(), Batches())
    found = next(one for one in report.findings if one.kind == kind)
    assert found.file == "tests/test_profiling_trainer.py"
    if kind == "graph break":
        assert found.line == line_of("graph break")
        assert found.share is None
    else:
        assert found.line == line_of("recompilation")
        assert 0 < found.share < 1
    assert not {one.kind for one in report.findings} & ({"graph break", "recompilation"} - {kind})
    torch._dynamo.reset()


def test_an_accelerator_says_how_steps_are_traced(tmp_path):
    """Its ProfileKwargs count, but for their schedule: shapes are recorded, and the trace of these steps is written."""
    kwargs = ProfileKwargs(
        activities=["cpu"], record_shapes=True, output_trace_dir=str(tmp_path), schedule_option={"wait": 9, "active": 1}
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model = planted.Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader(planted.Rows(), 8))
    with profiled(schedule=Schedule(1, 2, 2, 1)) as profiler:
        for batch in rows:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if profiler.done:
                break
    assert profiler.report().observation.operators
    (path,) = tmp_path.iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(str(one.get("name", "")).startswith("Optimizer.step#") for one in events) == 2
    assert any("Input Dims" in one.get("args", {}) for one in events)
    accelerator.profile_handler = None  # or any later test would find it


def test_the_accelerator_of_a_trainer_says_how_steps_are_traced(tmp_path):
    class Told(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            traces = str(tmp_path / "traces")
            self.accelerator.profile_handler = ProfileKwargs(record_shapes=True, output_trace_dir=traces)
            accelerators.append(self.accelerator)

    accelerators = []
    run(Told, tmp_path, llama(), Batches(), Schedule(1, 2, 1, 1))
    accelerators[0].profile_handler = None
    (path,) = (tmp_path / "traces").iterdir()
    assert any("Input Dims" in one.get("args", {}) for one in json.loads(path.read_text())["traceEvents"])
