"""Profiling: planted faults are found with their line, a clean loop is silent, and nothing is left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import queue
import re
import runpy
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.overrides import _get_current_function_mode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from transformers import Trainer

from gradprobe_hf.cli.main import main
from gradprobe_hf.profiling import ProfileCallback, ProfileReport, Schedule, profiled
from gradprobe_hf.profiling.findings import CHECKS, findings_of
from gradprobe_hf.profiling.fixing.changes import CHANGES
from gradprobe_hf.profiling.fixing.trial import run_trial
from gradprobe_hf.profiling.observing import step_trace
from gradprobe_hf.profiling.observing.observation import Compilation, Observation
from gradprobe_hf.profiling.observing.places import Place, library_folders
from gradprobe_hf.profiling.script import profile_script
from tests import cases, planted, trainers

HERE = Path(__file__)
LOCATED = ["synchronization", "print", "constant tensor", "norms one by one", "cast of a weight", "zeroed gradients"]
SET_UP = ["optimizer", "parameter without gradient", "gradient without optimizer"]
ONE_PROCESS = {"collectives", "imbalance between ranks"}


@pytest.fixture(autouse=True)
def untouched():
    """Whatever a test does, torch is as it was; and no test before it has compiled anything."""
    planted.forget_compilations()
    marks = [torch.autograd.backward, _BaseDataLoaderIter.__next__]
    yield
    assert [torch.autograd.backward, _BaseDataLoaderIter.__next__] == marks
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert _get_current_function_mode() is None


def kinds(report, least=0.0):
    return {one.kind for one in report.findings if (one.share or 0) >= least}


@pytest.mark.parametrize("fault", [*LOCATED, "float32 product", *SET_UP])
def test_a_planted_fault_is_found_with_its_line(fault, capsys):
    report = planted.train(fault)
    found = [one for one in report.findings if one.kind == fault]
    assert [(one.file, one.line) for one in found] == [("tests/planted.py", planted.line_of(fault))]
    assert found[0].share is None if fault in SET_UP[1:] else 0 < found[0].share < 1
    assert not (kinds(report) & {*LOCATED, *SET_UP, "float32 product"}) - {fault}


def test_a_clean_loop_is_silent():
    made = [torch.rand(1024, planted.WIDTH)] * 40
    report = planted.train(rows=made, batch_size=None, schedule=Schedule(2, 8, 1, 3))
    assert not kinds(report)
    assert "No finding takes 1% of a step, of the kinds that this run could tell." in report.markdown()
    assert (
        set(report.not_evaluable)
        == {
            "padding",
            "float32 product",
            "float32 precision",
            "eager attention",
            "flash attention",
            "batch headroom",
            "idle device",
        }
        | ONE_PROCESS
    )
    assert report.observation.complete


def test_a_loader_that_is_waited_for():
    report = planted.train(rows=planted.Rows(sleep=2e-3), batch_size=8)
    found = next(one for one in report.findings if one.kind == "data loading")
    assert (found.file, found.line) == ("tests/planted.py", planted.line_of("data loading"))
    assert found.share == pytest.approx(report.shares["data loading"], abs=0.1)  # of other steps, on a busy machine
    assert found.severity == "high"
    assert "Rows; no worker" in found.evidence


def test_a_loader_that_another_thread_waits_for():
    """What it waits is none of the step's."""
    loader, batches = iter(DataLoader(planted.Rows(sleep=1e-3), 4)), queue.Queue(maxsize=1)

    def fetch():
        for _ in range(planted.SHORT.steps + 1):
            batches.put(next(loader))

    model = planted.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with profiled(model, schedule=planted.SHORT) as profiler:
        threading.Thread(target=fetch, daemon=True).start()
        while not profiler.done:
            model(batches.get()).mean().backward()
            optimizer.step()
    report = profiler.report()
    assert report.shares["data loading"] == 0
    assert "data loading" not in kinds(report)
    assert report.not_evaluable["data loading"] == report.not_evaluable["padding"]
    assert report.not_evaluable["padding"] == "a thread of the script's own fetches the batches, beside the steps"
    assert not report.throughput
    assert CHANGES["batch-size"].needless(report.observation) == "how many samples a step has is not known"


def test_padding_in_a_loop():
    """60% of it, in a loop whose batches have a mask."""
    mask = torch.tensor([[1, 1, 0, 0, 0]])
    rows = [{"input_ids": torch.ones(1, 5, dtype=torch.long), "attention_mask": mask}] * 20
    model = torch.nn.Embedding(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with profiled(schedule=planted.SHORT) as profiler:
        for batch in DataLoader(rows, batch_size=None):
            model(batch["input_ids"]).mean().backward()
            optimizer.step()
    report = profiler.report()
    found = next(one for one in report.findings if one.kind == "padding")
    assert found.evidence.startswith("60.0% of the tokens")
    assert found.share == pytest.approx(0.6 * (report.shares["forward"] + report.shares["backward"]))


def test_shares_are_of_all_of_a_step():
    report = planted.train()
    assert sum(report.shares.values()) == pytest.approx(1)
    assert all(report.shares[stage] > 0 for stage in ("data loading", "forward", "backward", "optimizer", "other"))
    seen = report.observation
    assert sum(seen.stages.values()) == pytest.approx(sum(seen.timed), rel=0.05)
    assert report.throughput == {"samples_per_second": pytest.approx(64 / report.step_seconds["mean"])}
    assert {"aten::addmm", "aten::mm"} & {one.name for one in seen.operators}


def test_a_step_that_fails_has_no_time_of_those_behind_it():
    """A loop goes on when memory was short, say."""

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                self.fails = False
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = planted.Net()
    optimizer = Failing(model.parameters(), lr=0.1, foreach=True)
    with profiled(model, schedule=planted.SHORT) as profiler:
        for rows in DataLoader(planted.Rows(), 4):
            model(rows).mean().backward()
            with contextlib.suppress(RuntimeError):
                optimizer.step()
            if profiler.done:
                break
    assert profiler.report().shares["other"] > 0


def test_the_schedule_is_kept_and_the_rest_unobserved():
    report = planted.train(schedule=Schedule(1, 2, 3, 4))
    seen = report.observation
    assert (len(seen.timed), len(seen.traced), seen.located) == (2, 3, 4)
    with pytest.raises(ValueError, match=r"warmup must be a number of steps, at least 1, got 0\."):
        Schedule(warmup=0)


def test_a_trace_is_bounded(monkeypatch):
    """It ends with the step in which it becomes too large; that step counts."""
    grown = iter(range(0, 10 * 2**30, 2**29))
    monkeypatch.setattr(step_trace, "process_bytes", lambda: next(grown))
    report = planted.train(schedule=Schedule(1, 2, 50, 2))
    seen = report.observation
    assert (len(seen.traced), seen.located, seen.complete) == (3, 2, True)
    assert next(one.count for one in seen.operators if one.name == "aten::addmm") == 3 * 3


def test_steps_that_the_loop_marks_itself():
    """Without an optimizer; `.step()` also wins over the optimizer's steps."""
    model = planted.Net("constant tensor")
    with profiled(model, schedule=planted.SHORT) as profiler:
        while not profiler.done:
            model(torch.ones(4, planted.WIDTH))
            profiler.step()
    report = profiler.report()
    assert report.shares["forward"] > report.shares["backward"] == 0
    assert "constant tensor" in kinds(report)
    assert report.not_evaluable["data loading"] == "no torch DataLoader was used in a step"


def test_a_loop_that_profiles_itself_in_a_script(tmp_path, capsys):
    """Its steps are the script's; alone it has its own report."""
    path = tmp_path / "loop.py"
    path.write_text(
        "import torch\n"
        "from gradprobe_hf.profiling import Schedule, profiled\n"
        "model = torch.nn.Linear(8, 8)\n"
        "with profiled(model, schedule=Schedule(1, 2, 1, 1)) as profiler:\n"
        "    while not profiler.done:\n"
        "        model(torch.ones(2, 8)).sum().backward()\n"
        "        profiler.step()\n"
        "print(len(profiler.report().observation.timed))\n"
    )
    schedule = Schedule(2, 3, 1, 1)
    ended, whole = (profile_script(str(path), [], schedule, whole_run) for whole_run in (False, True))
    assert len(ended.report.observation.timed) == len(whole.report.observation.timed) == 3
    assert whole.report.shares["forward"] > 0
    assert capsys.readouterr().out == "3\n"
    assert len(run_trial(str(path), [], None, 2, 3).seconds) == 3
    runpy.run_path(str(path))
    assert capsys.readouterr().out == "2\n"


class Few(planted.Rows):
    def __len__(self):
        return 96


@pytest.mark.parametrize(("marks", "every"), [(False, 1), (False, 3), (True, 3)])
def test_evaluations_are_in_no_figure(marks, every):
    """Args: marks: whether the loop says itself where a step ends."""
    model, schedule = planted.Net(), Schedule(2, 4, 2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profiled(schedule=schedule) as profiler:
        for step, batch in enumerate(DataLoader(planted.Rows(), 8)):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0:
                with torch.no_grad():
                    for rows in DataLoader(Few(), 32):
                        model(rows)
            if marks:
                profiler.step()
            if profiler.done:
                break
    report = profiler.report()
    seen = report.observation
    assert seen.complete
    assert len(seen.timed) == 4
    assert seen.contents.samples == 8 * seen.contents.steps
    assert [(one.dataset, one.batches) for one in seen.loaders] == [("Rows", 4)]
    assert seen.evaluations >= 3
    assert f"Evaluations between these steps, {seen.evaluations}, are in no figure." in report.markdown()
    if not marks:
        assert {one.name: one.count for one in seen.modules}["(model)"] == seen.located == 2
    aten = next(one for one in seen.operators if one.name == "aten::addmm")
    assert aten.count == 3 * len(seen.traced)


def test_what_is_made_of_an_evaluation_is_in_no_figure():
    """A metric, say, behind its last pass."""
    model, rows = planted.Net(), planted.Rows(1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profiled(schedule=Schedule(2, 4, 1, 1)) as profiler:
        for batch in DataLoader(rows, 8):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for few in DataLoader(Few(), 32):
                    model(few)
            time.sleep(0.5)
            if profiler.done:
                break
    report = profiler.report()
    seen = report.observation
    assert max(seen.timed) < 0.5
    assert seen.stages["data loading"] >= seen.loaders[0].seconds >= 4 * 8 * 1e-3
    assert sum(seen.stages.values()) == pytest.approx(sum(seen.timed), rel=0.01)


@pytest.mark.parametrize("sizes", [(4, 12), (8, 8)])
def test_batches_of_two_loaders_in_one_pass_count(sizes):
    """A pass took one of them, and the others were never counted."""
    model = planted.Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profiled(schedule=Schedule(3, 4, 1, 4)) as profiler:
        for both in zip(*(DataLoader(planted.Rows(), size) for size in sizes), strict=False):
            model(torch.cat(both)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if profiler.done:
                break
    seen = profiler.report().observation
    assert seen.timed_contents.samples == 16 * len(seen.timed)
    assert seen.contents.samples == 16 * seen.contents.steps


def test_batches_that_are_left_out_do_not_count():
    model = planted.Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profiled(schedule=Schedule(3, 6, 1, 1)) as profiler:
        for number, batch in enumerate(DataLoader(planted.Rows(), 4)):
            if number % 2:
                continue
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if profiler.done:
                break
    assert profiler.report().observation.timed_contents.samples == 6 * 4


def test_workers_that_start_anew_with_each_epoch():
    """What that takes was in no figure of the loader, and the advice was to take more of them."""
    model = planted.Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = DataLoader(Few(), 32, num_workers=2)
    with profiled(schedule=Schedule(3, 6, 1, 1)) as profiler:
        while not profiler.done:
            for batch in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    report = profiler.report()
    (waited,) = report.observation.loaders
    assert waited.batches == 6
    assert waited.seconds > waited.starting > waited.seconds / 2
    assert report.observation.stages["data loading"] == pytest.approx(waited.seconds, rel=0.3)
    (found,) = [one for one in report.findings if one.kind == "data loading"]
    assert "workers that start and end with an epoch" in found.evidence
    assert "with persistent_workers=True" in found.remedy


def test_passes_without_gradients_on_a_batch_of_its_own_belong_to_a_step():
    """As where what is trained on is generated first."""
    model = planted.Net()
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Few(), 32)
    with profiled(schedule=Schedule(2, 6, 1, 1)) as profiler:
        while not profiler.done:
            for batch in rows:
                with torch.no_grad():
                    model(batch)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    seen = profiler.report().observation
    assert not seen.evaluations
    assert seen.contents.samples == 32 * seen.contents.steps
    assert sum(one.batches for one in seen.loaders) == 6


def test_a_report_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    path = tmp_path / "reports" / "one.md"
    with pytest.raises(ZeroDivisionError), profiled(planted.Net(), save=path):
        path.mkdir() or 1 / 0
    assert "the profile was not written" in caplog.text
    with pytest.raises(IsADirectoryError, match=r"is a folder: give the name of a file"), profiled(save=tmp_path):
        pass
    callback = ProfileCallback(planted.SHORT, save=tmp_path / "others" / "two.json")
    rows, model = trainers.Rows(), cases.build("llama")
    Trainer(model, trainers.arguments(tmp_path, max_steps=9), train_dataset=rows, callbacks=[callback]).train()
    assert ProfileReport.read(tmp_path / "others" / "two.json").observation.complete


def test_the_loop_knows_better_than_its_optimizer():
    """Steps that are marked count, not the optimizer's two in each."""
    model = planted.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 0
    with profiled(model, schedule=Schedule(1, 2, 1, 1)) as profiler:
        while not profiler.done:
            for _ in range(2):
                model(torch.ones(1, planted.WIDTH)).mean().backward()
                optimizer.step()
            profiler.step()
            count += 1
    assert count == 5
    report = profiler.report()
    assert report.shares["optimizer"] > 0
    drawn = [span.stage for span in report.observation.spans]
    assert drawn.count("optimizer") == 2 * 2, "of the two timed steps; those before the loop spoke are not drawn"


def test_a_library_is_one_wherever_it_is(tmp_path, monkeypatch):
    """A clone that was installed as editable is in no site-packages."""
    (tmp_path / "cloned").mkdir()
    (tmp_path / "cloned" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert library_folders(["cloned", "not_installed"]) == (f"{tmp_path / 'cloned'}/",)


def test_what_changes_is_not_constant():
    model = planted.Net()
    with profiled(model, schedule=planted.SHORT) as profiler:
        while not profiler.done:
            torch.triu(torch.rand(8, 8))
            profiler.step()
    assert "constant tensor" not in kinds(profiler.report())


@pytest.mark.parametrize("clips", [False, True])
def test_gradient_spikes(clips):
    """One batch in a located step is a thousand times as large."""
    model = planted.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    with profiled(schedule=Schedule(2, 1, 1, 3)) as profiler:
        for step in range(8):
            (model(torch.ones(4, planted.WIDTH)).mean() * (1000 if step == 5 else 1)).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    report = profiler.report()
    assert len(report.observation.gradient_norms) == 5
    assert ("gradient spikes" in kinds(report)) is not clips
    assert ProfileReport.from_dict(json.loads(report.json())).markdown() == report.markdown()


def test_a_step_that_a_scaler_leaves_out_is_no_spike():
    """As most runs in float16 begin. A fused optimizer is called for it all the same."""
    model = planted.Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=1e-30)
    with profiled(schedule=Schedule(3, 1, 1, 3)) as profiler:
        while not profiler.done:
            scaler.scale(100 * model(torch.ones(4, planted.WIDTH)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    report = profiler.report()
    assert len(report.observation.gradient_norms) == 5, "of six steps"
    assert all(map(math.isfinite, report.observation.gradient_norms))
    assert "gradient spikes" not in kinds(report)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_gradients_that_are_no_numbers_are_found_and_the_report_is_json(factor, tmp_path):
    seen = planted.train().observation
    seen = replace(seen, gradient_norms=(1.0, factor, 1.0, 10.0))
    report = ProfileReport(seen)
    (found,) = (one for one in report.findings if one.kind == "gradient spikes")
    assert "no finite number, in step 2 of 4" in found.evidence
    report.save(tmp_path / "report.json")
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    again = ProfileReport.read(tmp_path / "report.json")
    assert again.markdown() == report.markdown()
    assert math.isnan(again.observation.gradient_norms[1])


def test_a_gpu_that_multiplies_in_full_float32():
    """As the setup of a run on CUDA would have it; a CPU cannot tell."""
    seen = planted.train().observation
    slow = replace(seen, device="cuda:0", setup=replace(seen.setup, float32_products="highest"))
    assert "float32 precision" in kinds(ProfileReport(slow))
    fast = replace(slow, setup=replace(slow.setup, float32_products="high"))
    assert "float32 precision" not in {*kinds(ProfileReport(fast)), *ProfileReport(fast).not_evaluable}
    assert ProfileReport(seen).not_evaluable["float32 precision"] == "cpu is not known to have TF32"


def test_an_interrupted_loop_leaves_a_report(tmp_path):
    def interrupt(step):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planted.train("synchronization", save=tmp_path / "report.json", at_end=interrupt)
    report = ProfileReport.read(tmp_path / "report.json")
    assert len(report.observation.timed) == 2
    assert not report.observation.complete
    assert report.shares["data loading"] > 0
    assert report.not_evaluable["synchronization"] == "the run ended before lines were looked for"
    assert "The run ended before all steps of the schedule were seen." in report.markdown()


def test_a_loop_that_ends_in_its_warm_up():
    report = planted.train(steps=0)
    assert set(report.not_evaluable) == set(CHECKS)
    assert "Nothing was measured: the run ended after 1 steps" in report.markdown()
    assert not report.findings
    json.loads(report.json())


def test_one_observation_is_one_report(tmp_path, capsys):
    """Read twice, and in two forms: the same findings, shares and lines."""
    report = planted.train("print")
    for name in ("report.json", "report.md", "report.html"):
        report.save(tmp_path / name)
    again = ProfileReport.read(tmp_path / "report.json")
    assert again.json() == report.json()
    assert again.markdown() == (tmp_path / "report.md").read_text()
    assert again.html() == (tmp_path / "report.html").read_text()
    said = json.loads((tmp_path / "report.json").read_text())
    rows = re.findall(r"^\| ([\d.]+)% \| ([\w ]+) \| ([^|]+) \|", again.markdown(), flags=re.M)
    assert [(kind, line.strip()) for _, kind, line in rows] == [
        (one["kind"], f"{one['file']}:{one['line']}") for one in said["findings"]
    ]
    assert [float(share) for share, *_ in rows] == [round(one["share"] * 100, 2) for one in said["findings"]]
    for stage, share in said["stages"].items():
        assert f"| {stage} | {share:.1%} |" in again.markdown()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is no report of `gradprobe profile`"):
        ProfileReport.read(tmp_path / "other.json")


def test_a_page_has_what_the_tables_have(tmp_path):
    """As a reader of XML sees it: pictures that are drawn, cells as in Markdown, and nothing from elsewhere."""
    report = planted.train("synchronization")
    text = report.html()
    body = ElementTree.fromstring(text[text.index("<body>") : text.index("</html>")])
    cells = [["".join(cell.itertext()) for cell in row] for row in body.iter("tr")]
    for _, header, rows in report.tables():
        assert header in cells
        assert all(row in cells for row in rows)
    titles = ["".join(one.itertext()) for one in body.iter("title")]
    for stage, share in report.shares.items():
        assert f"{stage}: {share:.1%}" in titles
    assert sum(one.startswith("process, step") for one in titles) == len(report.observation.memory)
    assert sum(one.startswith("forward: ") and one.endswith("ms") for one in titles) == planted.SHORT.timed
    assert not list(body.iter("script"))
    assert "http" not in text
    hostile = replace(report.observation, device="<script>alert(1)</script>")
    assert "<script>" not in ProfileReport(hostile).html()


def test_a_trainer(tmp_path):
    """Padding, tokens, stages; the lines of the Trainer itself belong to the call of `train`."""

    def padded(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        mask = torch.ones_like(ids)
        mask[:, 6:] = 0
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}

    class Loud(Trainer):
        def compute_loss(self, *arguments, **more):
            loss = super().compute_loss(*arguments, **more)
            bool(loss > 0)  # a planted one
            return loss

    callback = ProfileCallback(planted.SHORT, save=tmp_path / "report.json")
    options = trainers.arguments(tmp_path, max_steps=12, logging_steps=100)
    Loud(
        cases.build("llama"), options, train_dataset=trainers.Rows(), data_collator=padded, callbacks=[callback]
    ).train()
    report = ProfileReport.read(tmp_path / "report.json")
    lines = HERE.read_text().splitlines()
    found = [lines[one.line - 1].strip() for one in report.findings if one.kind == "synchronization"]
    assert "bool(loss > 0)  # a planted one" in found
    assert report.shares["forward"] > 0
    assert report.shares["backward"] > 0
    padding = next(one for one in report.findings if one.kind == "padding")
    assert padding.evidence.startswith("50.0% of the tokens")
    assert padding.share == pytest.approx(0.5 * (report.shares["forward"] + report.shares["backward"]))
    per_step = report.throughput["tokens_per_second"] * report.step_seconds["mean"]
    assert per_step == pytest.approx(2 * 6)


def test_tokens_a_second_are_those_of_the_timed_steps():
    """Of batches in the order of their length those of other steps tell nothing."""
    rows = [{"input_ids": torch.ones(2, 2 * step + 2).long()} for step in range(20)]
    for row in rows:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        row["attention_mask"][1, -1] = 0
    model = torch.nn.Embedding(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with profiled(model, schedule=Schedule(warmup=2, timed=5, traced=1, located=2)) as profile:
        for batch in DataLoader(rows, batch_size=None):
            model(batch["input_ids"]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = profile.report()
    seconds, counted = sum(report.observation.timed), sum(int(row["attention_mask"].sum()) for row in rows[2:7])
    assert report.throughput["tokens_per_second"] * seconds == pytest.approx(counted)
    assert report.throughput["samples_per_second"] * seconds == pytest.approx(10)
    again = ProfileReport(Observation.from_dict(json.loads(json.dumps(report.observation.to_dict()))))
    assert again.throughput == report.throughput


def test_a_loader_s_own_seed_is_no_synchronization_of_its_user_s():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profiled(model, schedule=Schedule(warmup=1, timed=2, traced=1, located=3)) as profile:
        for _ in range(8):
            for rows in DataLoader(torch.ones(2, 2), batch_size=2):  # begins anew in each step
                model(rows).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert [one for one in profile.report().findings if one.kind == "synchronization"] == []


def test_a_callback_has_no_report_before_training():
    with pytest.raises(RuntimeError, match=r"call trainer\.train\(\) first"):
        ProfileCallback().report()


def test_what_was_compiled_is_a_finding():
    seen = replace(planted.train().observation, timed=(1.0, 2.0, 1.0))
    compiled = Compilation(Place("train.py", 7, "step"), 3, 0.8, "size mismatch at index 0")
    found = findings_of(replace(seen, compilations=(compiled,)))[0][0]
    assert (found.kind, found.file, found.line, found.share) == ("recompilation", "train.py", 7, pytest.approx(0.2))
    assert "compiled 3 times in 3 steps" in found.evidence
    assert "size mismatch" in found.evidence


@pytest.mark.slow
def test_recompilation():
    """A function that is compiled anew for each new shape."""

    @torch.compile(backend="eager", dynamic=False)
    def scaled(x, by):
        return x * by

    model = planted.Net()
    with profiled(model, schedule=Schedule(1, 3, 1, 1)) as profiler:
        for step in range(6):
            model(scaled(torch.ones(step + 2, planted.WIDTH), 2.0))
            profiler.step()
    report = profiler.report()
    found = next(one for one in report.findings if one.kind == "recompilation")
    assert found.evidence.startswith("compiled 3 times in 3 steps")
    assert HERE.read_text().splitlines()[found.line - 1].strip() in (
        "def scaled(x, by):",
        '@torch.compile(backend="eager", dynamic=False)',
    )
    assert report.observation.complete
    assert "torch.compile was used" in report.not_evaluable["synchronization"]
    torch._dynamo.reset()


SCRIPT = """
import sys
import torch

print("arguments:", sys.argv[1:])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for step in range(int(sys.argv[4])):
    loss = model(torch.ones(4, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    {fault}
print("the last line")
"""


def profile(tmp_path, capsys, *flags, fault="", steps=50):
    (tmp_path / "train.py").write_text(SCRIPT.format(fault=fault))
    command = ["profile", "script", str(tmp_path / "train.py"), "--json", str(tmp_path / "report.json"), *flags]
    try:
        code = main([*command, "--", "--lr", "1e-3", "--steps", str(steps)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr(), ProfileReport.read(tmp_path / "report.json")


def test_a_script(tmp_path, capsys):
    code, said, _, report = profile(tmp_path, capsys, "--timed", "4", "--markdown", str(tmp_path / "report.md"))
    assert code == 0
    assert "arguments: ['--lr', '1e-3', '--steps', '50']" in said
    assert "the last line" not in said
    assert len(report.observation.timed) == 4
    found = next(one for one in report.findings if one.kind == "synchronization")
    assert (found.file, found.line) == (str(tmp_path / "train.py"), 13)
    assert f"{found.file}:13" in said
    assert (tmp_path / "report.md").read_text() == report.markdown()
    assert "the last line" in profile(tmp_path, capsys, "--whole-run")[1]


def test_a_script_that_fails_or_is_interrupted(tmp_path, capsys):
    code, said, errors, report = profile(tmp_path, capsys, fault="if step == 6: raise ValueError('mine')")
    assert code == 1
    assert "ValueError: mine" in errors
    assert "Traceback" in errors
    assert not report.observation.complete
    code, said, errors, report = profile(tmp_path, capsys, fault="if step == 6: raise KeyboardInterrupt")
    assert code == 130
    assert "interrupted; the report is of what was seen until then" in errors
    assert len(report.observation.timed) == 4  # steps 3 to 6
    assert "before all steps" in said


def test_a_script_says_why_it_ends_and_has_logs_of_its_own(tmp_path, capsys):
    log, before = tmp_path / "train.log", logging.getLogger().handlers[:]
    begins = f"import logging; logging.basicConfig(level=logging.INFO, filename={str(log)!r}); logging.info('begun'); "
    code, _, errors, _ = profile(tmp_path, capsys, fault=begins + "sys.exit('there is no data in ./data')")
    assert code == 1
    assert "there is no data in ./data" in errors.splitlines()
    assert log.read_text() == "INFO:root:begun\n"
    assert logging.getLogger().handlers == before


def test_a_script_without_a_loop(tmp_path, capsys):
    _, said, _, report = profile(tmp_path, capsys, steps=0)
    assert "Nothing was measured: no step of a torch.optim optimizer was seen" in said
    assert not report.observation.timed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "script", "no/such.py"], "there is no script 'no/such.py'"),
        (
            ["profile", "script", __file__, "--json", "no/folder/report.json"],
            "--json no/folder/report.json: name a file",
        ),
        (["profile", "script", __file__, "--timed", "0"], "--timed must be a number of steps, at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    assert main(arguments) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_share_of_a_slow_loader(share):
    """Within 10% of what it is: what the data set slept, by its own clock, and what loading takes without."""
    schedule = Schedule(3, 20, 1, 1)
    plain = planted.train(schedule=schedule, batch_size=8)
    rows = planted.Rows(sleep=share / (1 - share) * plain.step_seconds["median"] / 8)
    report = planted.train(schedule=schedule, batch_size=8, rows=rows)
    loading = sum(rows.slept[8 * 3 : 8 * 23]) + plain.observation.stages["data loading"]
    found = next(one for one in report.findings if one.kind == "data loading")
    assert found.share == pytest.approx(loading / sum(report.observation.timed), rel=0.1)


@pytest.mark.slow
def test_what_profiling_costs():
    """Steps under torch.profiler take less than twice as long, where a step takes milliseconds.

    In seconds of the processor, which no other program's are.
    """
    made, reached = [torch.rand(1024, planted.WIDTH)] * 60, []
    schedule = Schedule(3, 20, 20, 3)
    planted.train(rows=made, batch_size=None, schedule=schedule, at_end=lambda _: reached.append(time.process_time()))
    seconds = [after - before for before, after in itertools.pairwise(reached)]  # of step 1 and on
    timed, traced = seconds[2:21], seconds[22:41]  # a phase begins and ends within the last step of another
    assert median(traced) < 2 * median(timed)


def test_accumulated_batches_are_one_step():
    model = planted.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profiled(model, schedule=planted.SHORT) as profiler:
        for number, rows in enumerate(DataLoader(planted.Rows(), 4)):
            model(rows).mean().backward()
            if number % 3 == 2:
                optimizer.step()
            if profiler.done:
                break
    report = profiler.report()
    assert report.throughput["samples_per_second"] * report.step_seconds["mean"] == pytest.approx(12)


def in_phases(*steps):
    """The report of a training with an optimizer, and a model, for each number of steps."""
    with profiled(schedule=planted.SHORT) as profiler:
        for number in steps:
            model = planted.Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
            for batch in itertools.islice(DataLoader(planted.Rows(), 4), number):
                model(batch).mean().backward()
                optimizer.step()
    return profiler.report()


def test_a_phase_that_ends_is_followed_by_the_next():
    """A head is trained by itself, and all of the model behind it with another optimizer."""
    report = in_phases(3, 10 + planted.SHORT.steps)
    assert report.observation.complete
    assert (report.observation.warmup, len(report.observation.timed)) == (planted.SHORT.warmup, planted.SHORT.timed)
    assert report.shares["forward"] > 0
    assert report.shares["backward"] > 0
    assert report.observation.setup.tensors == 2 * 3, "of the second model alone"
    assert any("this is number 2" in line for line in report.summary())
    assert ProfileReport.from_dict(report.to_dict()).observation.training_phase == 2


def test_the_phase_that_was_measured_is_the_one_that_is_told_of():
    report = in_phases(4, 11)
    assert (len(report.observation.timed), report.observation.training_phase) == (2, 1)
    assert report.summary()[0].startswith("The run ended before")


def test_two_optimizers_in_turns_are_one_training():
    """A discriminator takes five steps for one of its generator, which is the first to step here."""
    models = [planted.Net() for _ in range(2)]
    generator, discriminator = (torch.optim.SGD(one.parameters(), lr=0.1, foreach=True) for one in models)
    with profiled(schedule=planted.SHORT) as profiler:
        for batch in DataLoader(planted.Rows(), 4):
            for model, optimizer in zip(models, (generator, discriminator), strict=True):
                for _ in range(1 if optimizer is generator else 5):
                    model(batch).mean().backward()
                    optimizer.step()
            if profiler.done:
                break
    report = profiler.report()
    assert report.observation.complete
    assert report.observation.training_phase == 1


@pytest.mark.slow
def test_the_example_and_its_mended_twin(tmp_path):
    """All of the faults that its first line speaks of, and none of them where they are mended."""
    found = {}
    for flags in ([], ["--mended"]):
        path = tmp_path / "report.json"
        command = [sys.executable, "-m", "gradprobe_hf", "profile", "script", "examples/slow_training.py"]
        subprocess.run([*command, "--json", path, "--", *flags], check=True, cwd=HERE.parent.parent)
        found[len(flags)] = ProfileReport.read(path)
    assert kinds(found[0]) >= {*LOCATED[:4], "data loading", "padding"}
    assert not kinds(found[1]) & {*LOCATED, "padding"}
    assert found[1].throughput["tokens_per_second"] > found[0].throughput["tokens_per_second"]
