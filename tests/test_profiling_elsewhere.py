"""Profiles of what is no training script: a pruning run, and traces that were recorded elsewhere."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader

import gradprobe_hf
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.memory.measured_passes import MeasuredPass
from gradprobe_hf.profiling import ProfileReport, pruning_passes
from gradprobe_hf.profiling.findings import CHECKS
from gradprobe_hf.profiling.observing.batch_contents import contents_of
from gradprobe_hf.profiling.observing.observation import BatchSize, RunStage
from gradprobe_hf.profiling.observing.places import Place, place_of
from gradprobe_hf.profiling.observing.schedule import Schedule
from gradprobe_hf.profiling.observing.traced_events import busy_seconds
from gradprobe_hf.profiling.pruning_run import profile_pruning, shortened
from gradprobe_hf.profiling.trace import events, read_trace
from gradprobe_hf.runtime.stopwatch import _listeners
from tests import cases, planted

STEPS = Schedule(warmup=1, timed=2, traced=1, located=1)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    planted.forget_compilations()


def pruning(tmp_path=None, samples=6, **more):
    """A pruning run of a tiny model on batches of one row."""
    model = cases.build("llama")
    rows = [{"input_ids": torch.randint(0, 256, (1, 16)), "labels": torch.randint(0, 256, (1, 16))}] * samples
    before = [one.clone() for one in model.parameters()]
    config = GradProbeConfig(**{"probes": 2, "batch_size": 1, **more})

    def run():
        return prune_pretrained(model, config, calibration=rows, evaluation=False, apply=False, progress=False)

    found = profile_pruning(run, STEPS)
    assert not _listeners
    assert all(torch.equal(one, was) for one, was in zip(model.parameters(), before, strict=True))
    return found


def test_a_pruning_run():
    report = pruning().report
    seen = report.observation
    assert [one.name for one in seen.run][-5:] == ["reach", "probe 0", "candidates", "probe 1", "selection"]
    assert all(0 <= one.begin <= one.end and one.process > 2**20 for one in seen.run)
    assert (seen.warmup, len(seen.timed), len(seen.traced), seen.located) == (1, 2, 1, 1)
    assert report.shares["forward"] > 0.05
    assert report.shares["backward"] > 0.05
    assert report.throughput["tokens_per_second"] * report.step_seconds["mean"] == pytest.approx(16)
    assert report.recent_throughput["tokens_per_second"] == pytest.approx(report.throughput["tokens_per_second"])
    assert {"LlamaMLP", "LlamaAttention"} <= {one.kind for one in seen.modules}
    assert "## The run" in report.markdown()
    by_name = {one.what: one for one in seen.expected}
    assert (by_name["forward passes"].estimated, by_name["forward passes"].measured) == (2, 2)
    assert (by_name["backward passes"].estimated, by_name["backward passes"].measured) == (2, 2)
    memory = by_name["memory of the host"]
    assert 0.3 < memory.estimated / memory.measured < 3
    assert "| forward passes | 2 | 2 |" in report.markdown()
    assert [one.times for one in seen.batches][:3] == [1, 2, 4]
    assert all(one.failed is None and one.room > 2**20 for one in seen.batches)
    assert seen.checkpointing is False
    assert seen.other_checkpointing.gain > 0
    assert [one.option for one in seen.options] == [
        "--batch-size",
        "--checkpointing",
        "--accumulator-device",
        "placement",
    ]
    assert (by_name["activations of 4 sequences"].estimated or 0) > by_name["activations of 1 sequences"].estimated
    assert "| 1x, checkpointing on |" in report.markdown()
    assert {"Options by these measurements", "Batch sizes"} <= {title for title, _, _ in report.tables()}
    assert "A batch of a probe takes" in report.markdown()
    again = ProfileReport.from_dict(json.loads(report.json()))
    assert again.markdown() == report.markdown()


def test_a_pruning_run_that_checkpoints():
    """What is computed again is measured, and the remedy is an option of the run."""
    found = next(one for one in pruning(checkpointing=True).report.findings if one.kind == "checkpointing")
    assert 0 < found.share < 0.6
    assert "--checkpointing auto" in found.remedy


@pytest.fixture(scope="module")
def ran():
    """What was seen of a loop, a run's result, and a batch of it."""
    rows = cases.batches("llama", rows=2, batch_size=1)
    config = GradProbeConfig(probes=1, batch_size=1)
    result = prune_pretrained(
        cases.build("llama"), config, calibration=rows, evaluation=False, apply=False, progress=False
    )
    seen = planted.train().observation
    return replace(seen, run=(RunStage("probe 0", 0.0, 1.0, seen.memory[0].process),)), result, rows[0]


def made_pass(rows, checkpointing, each, seconds):
    taken = each * rows // (3 if checkpointing else 1)
    return MeasuredPass(rows, checkpointing, taken, seconds(rows) * (1.4 if checkpointing else 1))


@pytest.mark.parametrize(
    ("own", "each", "seconds", "options", "times"),
    [
        # A larger batch is faster, and there is room; with checkpointing it is not faster.
        ("auto", 10, lambda rows: 0.1 + rows / 100, ["64", "off, as it is"], [1, 2, 4, 64]),
        # So is one that takes 10 s, and no larger one is tried.
        ("auto", 10, lambda rows: 1 + rows / 10, ["28", "off, as it is"], [1, 2, 4, 28]),
        ("auto", 100, lambda rows: 1 + rows / 10, ["8", "off, as it is"], [1, 2, 4, 8]),
        # Only the first size fits.
        ("auto", 600, lambda rows: 1 + rows / 10, ["1, as it is", "off, as it is"], [1, 2, 4]),
        # All are as fast; without checkpointing it is faster.
        (True, 10, lambda rows: rows / 100, ["1, as it is", "off"], [1, 2, 4, 64]),
    ],
)
def test_what_passes_say_for_the_options(monkeypatch, ran, own, each, seconds, options, times):
    class Passes:
        def __init__(self, *_):
            pass

        def run(self, batch, checkpointing):
            return made_pass(len(batch["input_ids"]), checkpointing, each, seconds)

    monkeypatch.setattr(pruning_passes, "ProbePasses", Passes)
    monkeypatch.setattr(pruning_passes, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(pruning_passes, "activation_bytes", lambda *_, **__: each)
    seen, result, batch = ran
    execution = {**result.report.execution, "checkpointing": "on, as asked" if own is True else "off"}
    result = replace(result, report=replace(result.report, execution=execution))
    seen = replace(seen, recomputed=0.2 * (own is True))
    report = ProfileReport(pruning_passes.with_passes(seen, result, batch))
    seen = report.observation
    assert [one.value for one in seen.options] == [*options, "same, as it is", "in memory, as it is"]
    assert [one.times for one in seen.batches] == times
    assert sum(one.failed is not None for one in seen.batches) == (2 if each == 600 else 0)
    headroom = [one for one in report.findings if one.kind == "batch headroom"]
    assert bool(headroom) == options[0].isdigit()
    if own is True:
        found = next(one for one in report.findings if one.kind == "checkpointing")
        assert "Without it, a pass takes" in found.evidence
        assert "1.40 times as many sequences" in found.evidence


def test_checkpointing_where_memory_is_short():
    """Hardly any is free, and nothing is computed again."""
    seen = pruning().report.observation
    # A pass of a tiny model may take nothing that can be measured.
    passes = {
        "batches": (BatchSize(1, 4.0, 2**30),),
        "checkpointing": False,
        "other_checkpointing": BatchSize(1, 4.0, 2**29, gain=0.7),
    }
    full = replace(seen, memory=tuple(replace(one, free=one.process // 20) for one in seen.memory), **passes)
    setup = replace(seen.setup, attention={"sdpa": 2})
    (found,) = (one for one in ProfileReport(replace(full, setup=setup)).findings if one.kind == "checkpointing")
    assert "no layer is computed again in backward. With it, a pass takes 0.5 GiB where it took 1 GiB" in found.evidence
    assert found.share is None
    assert "checkpointing" not in {one.kind for one in ProfileReport(replace(seen, setup=setup)).findings}


def test_a_pruning_run_by_inputs_alone():
    report = pruning(score="wanda", probes=0).report
    assert report.shares["backward"] == 0
    assert "inputs" in {one.name for one in report.observation.run}


def test_an_interrupted_pruning_run():
    class Rows(list):
        def __iter__(self):
            for number, row in enumerate(list.__iter__(self)):
                if number == 4:
                    raise KeyboardInterrupt
                yield row

    rows = Rows([{"input_ids": torch.ones(1, 16, dtype=torch.long)}] * 6)

    def run():
        for row in rows:
            listener.batch(cases.build("llama"), row)

    found = profile_pruning(lambda: _listening(run), STEPS)
    assert found.interrupted
    assert not found.report.observation.complete
    assert len(found.report.observation.timed) == 2
    assert "The run ended before all steps" in found.report.markdown()


def _listening(run):
    global listener
    (listener,) = _listeners
    run()


def test_a_line_of_a_run_that_a_command_started():
    """There is no frame of a user: the package's own stands in. Where there is one, it is the line."""
    code = "def called(found):\n    found.append(place_of(sys._getframe()))\n"
    names = {"sys": sys, "place_of": place_of}
    exec(compile(code, str(Path(gradprobe_hf.__file__).parent / "model" / "passes" / "loss.py"), "exec"), names)
    found = []
    thread = threading.Thread(target=names["called"], args=(found,))
    thread.start()
    thread.join()
    names["called"](found)
    assert found[0] == Place("gradprobe_hf/model/passes/loss.py", 2, "called")
    assert (found[1].file, found[1].through) == ("tests/test_profiling_elsewhere.py", "passes/loss.py:2")


def test_a_short_run_is_the_same_with_fewer_windows():
    config = GradProbeConfig(sparsity=0.6, update="obs", probes=1, batch_size=2)
    assert shortened(config, STEPS) == GradProbeConfig.from_dict(config.to_dict() | {"num_samples": 10})
    assert shortened(GradProbeConfig(num_samples=3), STEPS).num_samples == 3
    with pytest.raises(ValueError, match="batch_size='auto' is chosen while a run goes"):
        shortened(GradProbeConfig(batch_size="auto"), STEPS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prune", "some/model", "--whole-run"], "--whole-run has no effect in `gradprobe profile prune`"),
        (["prune", "some/model", "--", "--overwrite"], "--overwrite has no effect here: nothing is written"),
        (["prune", "some/model", "--", "--batch-size", "auto"], "--batch-size auto is chosen while a run goes"),
        (["trace", "no.json"], "no.json: there is no such file; give a file that torch.profiler's"),
        (["trace", "/"], "/ is a folder; give a file that torch.profiler's"),
        (["trace", "no.json", "--timed", "3"], "--timed has no effect in `gradprobe profile trace`"),
        (["trace", "no.json", "--", "--steps"], "-- --steps has no effect in `gradprobe profile trace`"),
        (["trace", __file__], "is no trace that torch.profiler's export_chrome_trace wrote"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    assert main(["profile", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_only_what_nobody_misses_is_looked_into():
    """An iterator of micro-batches lost its first to the profiler, and what has no truth value ended the training."""
    rows = iter([torch.zeros(3, 2), torch.zeros(3, 2)])
    assert contents_of(rows) is None
    assert len(list(rows)) == 2
    rows = [torch.zeros(5)] * 3  # as `collate_fn=list` leaves them
    for odd in (rows, np.zeros((3, 2)), SimpleNamespace(x=torch.zeros(3)), object(), None, [], {}):
        assert contents_of(odd) is None
    for plain in (
        torch.zeros(3, 2),
        [torch.zeros(3, 2), 1],
        (torch.tensor(1), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(3)),
        {"x": torch.zeros(3)},
    ):
        assert contents_of(plain).samples == 3


@pytest.fixture
def recorded(tmp_path):
    """A trace of a loop in which the optimizer is slow, a loader sleeps and a value is read twice a step."""
    model = planted.Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    path = tmp_path / "trace.json.gz"
    rows = [torch.rand(8, planted.WIDTH)] * 4
    with profile(record_shapes=True) as profiler:
        for batch in DataLoader(planted.Rows(1e-3), 8):
            with record_function(f"ProfilerStep#{len(rows)}"):
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                loss.item(), bool(loss)
            rows.pop()
            if not rows:
                break
    profiler.export_chrome_trace(str(path))
    return path


def test_a_recorded_trace(recorded, tmp_path, capsys):
    reports = []
    for name in ("one.json", "two.json"):
        assert main(["profile", "trace", str(recorded), "--json", str(tmp_path / name)]) == 0
        reports.append((tmp_path / name).read_text())
    assert reports[0] == reports[1]
    report = ProfileReport.read(tmp_path / "one.json")
    assert len(report.observation.timed) == 4
    assert sum(report.shares.values()) == pytest.approx(1)
    assert 0 < report.shares["backward"] < 1
    by_kind = {one.kind: one for one in report.findings}
    assert ".item() and the like, 2 a step" in by_kind["synchronization"].evidence
    assert by_kind["optimizer"].share == pytest.approx(report.shares["optimizer"])
    assert by_kind["optimizer"].evidence.startswith("AdamW steps its tensors one after the other")
    assert by_kind["zeroed gradients"].evidence.startswith("zero_grad(set_to_none=False), 6 a step")
    assert report.slowdown is None
    assert set(report.not_evaluable) | set(by_kind) <= set(CHECKS)
    assert {"print", "padding", "recompilation", "batch headroom"} <= set(report.not_evaluable)
    assert "aten::addmm" in {one.name for one in report.observation.operators}
    said = capsys.readouterr().out
    assert "4 in a trace" in said


def event(name, begin, end, cat="cpu_op", tid=1, **arguments):
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "pid": 1,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": arguments,
    }


def on_a_gpu(tmp_path):
    """Two steps of 100 microseconds as torch writes them on CUDA, by hand: what comes out is known."""
    events = []
    for start in (0, 100):
        events += [
            event(f"ProfilerStep#{start}", start, start + 100, "user_annotation"),
            event(
                "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, start + 20, "user_annotation"
            ),
            event("aten::mm", start + 20, start + 25, **{"Input type": ["c10::BFloat16", "c10::BFloat16"]}),
            event("aten::mm", start + 25, start + 30, **{"Input type": ["float", "float"]}),
            event("autograd::engine::evaluate_function: MmBackward0", start + 30, start + 50, tid=2),
            event("aten::_local_scalar_dense", start + 50, start + 80),
            event("Optimizer.step#AdamW.step", start + 80, start + 95, "user_annotation"),
            event("aten::_fused_adamw_", start + 81, start + 94),
            event("a kernel", start + 30, start + 60, "kernel", tid=7),
            event("ncclDevKernel_AllReduce", start + 50, start + 75, "kernel", tid=8),
            event("Memcpy DtoH (Device -> Pageable)", start + 76, start + 78, "gpu_memcpy", tid=7),
        ]
    memory = {"Device Type": 1, "Device Id": 0, "Total Reserved": 3 * 2**30}
    events += [
        {"ph": "i", "name": "[memory]", "args": memory | {"Total Allocated": amount}} for amount in (2**31, 2**30)
    ]
    device = {"name": "A GPU", "totalGlobalMem": 16 * 2**30}
    trace = {"deviceProperties": [device], "distributedInfo": {"world_size": 2}, "traceEvents": events}
    path = tmp_path / "cuda.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def test_a_trace_of_a_gpu(tmp_path):
    seen = read_trace(on_a_gpu(tmp_path))
    report = ProfileReport(seen)
    assert seen.device == "cuda (A GPU)"
    assert seen.timed == pytest.approx((1e-4, 1e-4))
    assert seen.busy == pytest.approx(0.47)  # 30 to 75 and 76 to 78
    assert seen.collectives == pytest.approx(0.25)
    shares = {"data loading": 0.2, "backward": 0.2, "optimizer": 0.15, "forward and other": 0.45}
    assert report.shares == pytest.approx(shares)
    by_kind = {(one.kind, one.evidence.split(",")[0]): one for one in report.findings}
    read = by_kind["synchronization", ".item() and the like"]
    assert read.share == pytest.approx(0.3)
    assert "waits there until the device has done all its work" in read.evidence
    assert by_kind["float32 product", "products"].share == pytest.approx(0.05)
    kinds = {one.kind for one in report.findings}
    assert {"data loading", "batch headroom", "collectives", "idle device"} <= kinds
    idle = next(one for one in report.findings if one.kind == "idle device")
    assert idle.share == pytest.approx(0.53)
    assert "idle device" not in {one.kind for one in ProfileReport(replace(seen, busy=0.95)).findings}
    assert "optimizer" not in kinds  # fused
    headroom = next(one for one in report.findings if one.kind == "batch headroom")
    assert headroom.share is None
    assert "takes 2 GiB of" in headroom.evidence
    assert seen.operators[0].name == "a kernel"
    assert "The device is busy in 47.0% of a traced step." in report.markdown()
    long = replace(seen, operators=(replace(seen.operators[0], name="k" * 900),))
    assert f"| {'k' * 87}... |" in ProfileReport(long).markdown()
    assert "k" * 900 in ProfileReport(long).json()


TRACES = Path(__file__).parent / "traces"
RECORDED = ("a100_synchronization", "mi250_training", "nccl_128_processes", "v100_training")


def share_of_ticks(rows, step):
    """The share of a step's ticks of a tenth of a microsecond in which one of these rows was under way."""
    ticks = np.zeros(round(10 * step["dur"]), dtype=bool)
    for row in rows:
        begin = round(10 * (row["ts"] - step["ts"]))
        ticks[begin : begin + round(10 * row["dur"])] = True
    return ticks.mean()


@pytest.mark.parametrize("name", RECORDED)
def test_a_trace_that_was_recorded_on_a_gpu(name):
    """Against a time line of its raw rows, tick by tick."""
    path = TRACES / f"{name}.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    rows = [row for row in trace["traceEvents"] if row.get("ph") == "X"]
    step = next(
        row
        for row in rows
        if row["name"] in ("ProfilerStep#1", "ProfilerStep#100", "ProfilerStep#103", "ProfilerStep#551")
    )
    inside = [row for row in rows if step["ts"] <= row["ts"] < step["ts"] + step["dur"]]
    on_device = [row for row in inside if row["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    collectives = [row for row in inside if row["name"].startswith(("nccl:", "ncclKernel", "ncclDevKernel"))]
    seconds = Counter()
    for row in on_device:
        seconds[row["name"]] += row["dur"] * 1e-6

    seen = read_trace(path)
    assert seen.timed == pytest.approx((step["dur"] * 1e-6,))
    assert seen.busy == pytest.approx(share_of_ticks(on_device, step), abs=1e-3)
    assert (seen.collectives or 0.0) == pytest.approx(share_of_ticks(collectives, step), abs=1e-3)
    (name, longest), *_ = seconds.most_common()
    assert (seen.operators[0].name, seen.operators[0].seconds) == (name, pytest.approx(longest))


def test_what_a_recorded_trace_says():
    reports = {name: ProfileReport(read_trace(TRACES / f"{name}.json.gz")) for name in RECORDED}
    kinds = {name: {one.kind for one in report.findings} for name, report in reports.items()}
    assert kinds == {
        "a100_synchronization": {"idle device", "synchronization"},
        "mi250_training": {"idle device"},
        "nccl_128_processes": {"idle device", "collectives", "synchronization"},
        "v100_training": {"collectives"},
    }
    (exchanged,) = [one for one in reports["nccl_128_processes"].findings if one.kind == "collectives"]
    assert exchanged.evidence.startswith("a collective of 128 processes was under way in 32.2%")
    (unnumbered,) = [one for one in reports["v100_training"].findings if one.kind == "collectives"]
    assert unnumbered.evidence.startswith("a collective was under way")
    assert "does not say how many processes" in reports["mi250_training"].not_evaluable["collectives"]
    assert reports["v100_training"].observation.device == "cuda (Tesla V100-SXM2-32GB)"


def traced(tmp_path, events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    return ProfileReport(read_trace(path))


def test_what_sets_all_gradients_to_zero_is_told_once(tmp_path):
    """Not the tensors that it is called for, too."""
    step = event("ProfilerStep#1", 0, 100, "user_annotation")
    zero_grad = event("Optimizer.zero_grad#AdamW.zero_grad", 10, 60, "user_annotation")
    calls = [event("aten::_foreach_zero_", 20, 40), event("aten::zero_", 25, 30), event("aten::zero_", 31, 36)]
    calls.append(event("aten::zero_", 45, 50))
    report = traced(tmp_path, [step, zero_grad, *calls])
    (found,) = [one for one in report.observation.calls if one.kind == "zeroing"]
    assert (found.count, found.seconds) == (2, pytest.approx(25e-6))


def test_a_value_that_is_read_is_told_once(tmp_path):
    """Its copy is part of it; one to pinned memory need not be waited for."""
    copies = ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pinned)")
    report = traced(
        tmp_path,
        [
            event("ProfilerStep#1", 0, 100, "user_annotation"),
            event("aten::_local_scalar_dense", 10, 40),
            event(copies[0], 35, 39, "gpu_memcpy", tid=7),
            event(copies[0], 60, 65, "gpu_memcpy", tid=7),
            event(copies[1], 70, 90, "gpu_memcpy", tid=7),
        ],
    )
    found = {one.evidence.split(",")[0]: one.share for one in report.findings if one.kind == "synchronization"}
    assert found == {".item() and the like": pytest.approx(0.3), "a copy to the CPU": pytest.approx(0.05)}


def test_steps_of_batches_that_accumulate_count(tmp_path):
    steps = [event(f"ProfilerStep#{n}", 100 * n, 100 * n + 100, "user_annotation") for n in range(5)]
    stepping = [event("Optimizer.step#AdamW.step", at, at + 50, "user_annotation") for at in (150, 350)]
    report = traced(tmp_path, [*steps, *stepping])
    assert len(report.observation.timed) == 4  # the last one begins where the loop ends
    assert report.shares["optimizer"] == pytest.approx(0.25)


def test_nothing_is_said_of_an_optimizer_of_another_library(tmp_path):
    report = traced(
        tmp_path,
        [
            event("ProfilerStep#1", 0, 100, "user_annotation"),
            event("Optimizer.step#Adam8bit.step", 50, 95, "user_annotation"),
        ],
    )
    assert "optimizer" not in {one.kind for one in report.findings}
    assert report.not_evaluable["optimizer"] == "Adam8bit does not say how it steps its tensors"


def test_a_device_is_not_busy_where_a_program_has_named_a_region():
    def on_device(begin, end, is_user_annotation):
        times = SimpleNamespace(start=begin, end=end)
        return SimpleNamespace(time_range=times, device_type=DeviceType.CUDA, is_user_annotation=is_user_annotation)

    events = [on_device(0, 10, False), on_device(90, 100, False), on_device(0, 100, True)]
    assert busy_seconds(events) == pytest.approx(20e-6)


def test_a_trace_without_steps(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 10)]}))
    with pytest.raises(ValueError, match=r"has no step: call profiler\.step\(\) at the end of each"):
        read_trace(path)


def test_a_trace_that_is_too_large(tmp_path, monkeypatch):
    """Also one that is small until it is unpacked."""
    monkeypatch.setattr(events, "_LARGEST", 100)
    with pytest.raises(ValueError, match=r"record fewer steps, torch\.profiler\.schedule"):
        read_trace(on_a_gpu(tmp_path))


def test_steps_between_two_of_an_optimizer(tmp_path):
    path = tmp_path / "trace.json"
    steps = [event("Optimizer.step#SGD.step", at, at + 5, "user_annotation") for at in (0, 20, 50)]
    path.write_text(json.dumps(steps))  # a bare list is a trace, too
    seen = read_trace(path)
    assert seen.timed == pytest.approx((20e-6, 30e-6))
    assert "float32 product" in seen.missing
