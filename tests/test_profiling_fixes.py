"""Changes from outside: each does what it says to a script, is undone, and what it gains is a ratio side by side."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradprobe_hf.cli.main import main
from gradprobe_hf.cli.tables.profile import print_profile
from gradprobe_hf.estimation import peak as peak_module
from gradprobe_hf.estimation.peak import begin_peak, peak_allocated_bytes, peak_bytes, peak_resident_bytes
from gradprobe_hf.profiling import ProfileReport, Schedule
from gradprobe_hf.profiling.findings import CHECKS
from gradprobe_hf.profiling.fixing import changes as changes_module
from gradprobe_hf.profiling.fixing import fixes as fixes_module
from gradprobe_hf.profiling.fixing.batch_sizes import expanded, try_batch_sizes, unknown_room, with_gains
from gradprobe_hf.profiling.fixing.changes import CHANGES, MENDED
from gradprobe_hf.profiling.fixing.fixes import in_processes, try_changes
from gradprobe_hf.profiling.fixing.trial import Trial, run_trial
from tests import planted

ROOT = Path(__file__).parent.parent
LOOP = """
import time, torch
from torch.utils.data import DataLoader
from tests import cases

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep({sleep})
        return torch.arange(8) + index % 100

torch.manual_seed(0)
model = cases.build("llama").train()
model.set_attn_implementation("eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in DataLoader(Rows(), batch_size=4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
import sys
from transformers import Trainer
from tests import cases, trainers
model = cases.build("llama")
model.set_attn_implementation("eager")
options = trainers.arguments(sys.argv[1], max_steps=20, logging_steps=100, optim="adamw_torch")
Trainer(model, options, train_dataset=trainers.Rows()).train()
"""
EXPECTED = {
    "workers": "num_workers=2",
    "batch-size": "batch_size=8",
    "batch-size-4x": "batch_size=16",
    "attention": "attn_implementation='sdpa'",
    "precision": "forward under torch.autocast in bfloat16",
    "checkpointing": "gradient checkpointing on",
    "fused": "AdamW(fused=True)",
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(sleep=0))
    yield path
    marks = (Optimizer.__init__, DataLoader.__init__, torch.autograd.backward)
    assert all(not hasattr(one, "__wrapped__") for one in marks)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("change", list(EXPECTED))
def test_a_change_is_made_in_a_loop(change, script):
    plain, changed = (run_trial(str(script), [], name, 2, 2) for name in (None, change))
    assert changed.done == [EXPECTED[change]]
    assert not plain.done
    assert len(changed.seconds) == len(plain.seconds) == 2
    assert len(changed.losses) == 4
    assert plain.samples == 4
    assert changed.samples == {"batch-size": 8, "batch-size-4x": 16}.get(change, 4)
    if change.startswith("batch-size"):
        assert changed.losses != pytest.approx(plain.losses, rel=1e-4)
    else:
        assert changed.losses == pytest.approx(plain.losses, rel=5e-3 if change == "precision" else 1e-5)
    if change == "precision":
        assert changed.losses != pytest.approx(plain.losses, rel=1e-6)


def test_samples_are_those_of_the_steps_that_are_timed(script):
    """Of 40 rows in batches of 12 the last of four has 4; of 24 the last of two 16."""
    loader = "DataLoader(Rows(), batch_size={})"
    epochs = f"(ids for _ in range(9) for ids in {loader.format(12)})"
    script.write_text(LOOP.format(sleep=0).replace("return 400", "return 40").replace(loader.format(4), epochs))
    plain, larger = (run_trial(str(script), [], name, 3, 8) for name in (None, "batch-size"))
    assert (plain.samples, plain.largest) == (10, 12)
    assert (larger.samples, larger.largest) == (20, 24)


def test_changes_are_made_in_a_trainer(script, tmp_path, capsys):
    script.write_text(TRAINER)
    plain = run_trial(str(script), [str(tmp_path)], None, 2, 2)
    expected = EXPECTED | {"batch-size": "batch_size=4"}
    for change in ("batch-size", "attention"):
        changed = run_trial(str(script), [str(tmp_path)], change, 2, 2)
        assert changed.done == [expected[change]]
        assert changed.samples == (4 if change == "batch-size" else 2)
        if change != "batch-size":
            assert changed.losses == pytest.approx(plain.losses, rel=1e-5)


class Trials:
    """Made-up trials: seconds of a step by change, and a machine that becomes slower from run to run."""

    def __init__(self, seconds, drift=1.0, **more):
        self.seconds, self.drift, self.more = seconds, drift, more
        self.order = []

    def __call__(self, change):
        slow = self.drift ** len(self.order)
        self.order.append(change)
        if isinstance(self.seconds[change], str):
            raise RuntimeError(self.seconds[change])
        plain = {"done": ["it"] if change else [], "samples": 4.0, "largest": 4, "losses": [2.0, 1.0], "memory": 100}
        return Trial(**plain | self.more.get(change or "plain", {}), seconds=[self.seconds[change] * slow] * 3)


SEEN = planted.train("optimizer", rows=planted.Rows(1e-3), batch_size=4).observation
SEEN = replace(SEEN, contents=replace(planted.train(batch_size=4).observation.contents))


# A run's rate / the mean rate of those before and behind it, where each is slower by a tenth than the one before.
BESIDE = (1 / 1.1) / ((1 + 1 / 1.1**2) / 2)


def test_gains_are_of_runs_side_by_side():
    runs = Trials({None: 1.0, "fused": 0.5, "workers": 1.25}, drift=1.1)
    fused, workers = try_changes(runs, SEEN, ["fused", "workers"], rounds=2).fixes
    assert runs.order == [None, "fused", None, "workers", None, None, "workers", None, "fused", None]
    # Two unchanged runs around it: a steady drift all but cancels.
    assert fused.gains == pytest.approx((2 * BESIDE, 2 * BESIDE))
    assert pytest.approx(1, abs=0.01) == BESIDE
    assert fused.verdict == "pays"
    assert workers.gain == pytest.approx(0.8, rel=0.01)
    assert workers.verdict == "costs"
    assert fused.loss == "the same within 0"
    assert fused.memory == 1


def test_a_gain_is_of_all_steps():
    """Workers hand out several batches at once, and the median step waits for none."""
    seconds = {None: [1.0] * 4, "workers": [0.1, 0.1, 0.1, 3.7]}
    runs = lambda change: Trial(["it"] if change else [], seconds[change], 4.0, 4, [2.0, 1.0], 100)  # noqa: E731
    (workers,) = try_changes(runs, SEEN, ["workers"], rounds=1).fixes
    assert workers.gains == pytest.approx((1.0,))


def test_an_evaluation_is_in_no_trial(script):
    """Its rows were a step's, and so was its time."""
    evaluates = """    with torch.no_grad():
        for ids in DataLoader(Rows(), batch_size=50):
            model(input_ids=ids)
    time.sleep(0.5)
"""
    script.write_text(LOOP.format(sleep=0) + evaluates)
    trial = run_trial(str(script), [], None, 3, 4)
    assert trial.samples == 4
    assert max(trial.seconds) < 0.5


def test_a_second_loader_that_trains_is_no_evaluation(script):
    """Steps that take turns: those on the other had no samples, and what the loop did for them was in no step."""
    turns = """
import torch
from torch.utils.data import DataLoader
import time
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
rows = torch.ones(400, 8)
other = iter(DataLoader(torch.ones(400, 8), 6))
for step, (one, more) in enumerate(zip(DataLoader(rows, 4), DataLoader(rows, 12))):
    model(one).sum().backward()
    if step % 2:
        model(next(other)).sum().backward()
        time.sleep(0.1)
    optimizer.step()
"""
    script.write_text(turns)
    trial = run_trial(str(script), [], None, 5, 4)
    assert trial.samples == 4 + 12 + 6 / 2
    assert sum(one > 0.1 for one in trial.seconds) == 2


def test_what_rounds_do_not_agree_on_is_no_gain():
    class Wavering(Trials):
        def __call__(self, change):
            trial = super().__call__(change)
            later = self.order.count("fused") > 1
            return replace(trial, seconds=[2.0]) if change and later else trial

    (fused,) = try_changes(Wavering({None: 1.0, "fused": 0.5}), SEEN, ["fused"], rounds=2).fixes
    assert fused.gains == (2.0, 0.5)
    assert fused.verdict == "no difference that all rounds agree on"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"fused": {"losses": [2.0, 1.00001]}}, "the same within 1e-05"),
        ({"fused": {"losses": [2.0, 1.1]}}, "differs by up to 0.091 (relative)"),
        ({"batch-size": {"losses": [3.0]}}, "other batches: not comparable step by step"),
    ],
)
def test_losses_are_compared(more, said):
    (name,) = more
    (fix,) = try_changes(Trials({None: 1.0, name: 1.0}, **more), SEEN, [name], rounds=1).fixes
    assert fix.loss == said


def test_a_change_that_makes_a_loss_no_number_never_pays():
    nan = {"losses": [2.0, math.nan]}
    (fix,) = try_changes(Trials({None: 1.0, "fused": 0.1}, fused=nan), SEEN, ["fused"], rounds=2).fixes
    assert (fix.verdict, fix.pays, fix.untried) == ("not tried", False, "a loss is no number with it")

    class Wrong(Trials):  # without it, too
        def __call__(self, change):
            return replace(super().__call__(change), **nan)

    (fix,) = try_changes(Wrong({None: 1.0, "fused": 0.1}), SEEN, ["fused"], rounds=2).fixes
    assert (fix.verdict, fix.loss) == ("pays", "not comparable: a loss is no number")


def test_a_script_that_differs_from_itself():
    class Unseeded(Trials):
        def __call__(self, change):
            return replace(super().__call__(change), losses=[2.0 + len(self.order)])

    (fix,) = try_changes(Unseeded({None: 1.0, "fused": 1.0}), SEEN, ["fused"], rounds=1).fixes
    assert "the unchanged script from itself by 0.4: seed it" in fix.loss


def test_what_is_not_tried_says_why(capsys):
    runs = Trials(
        {None: 1.0, "fused": "the script ended with 1: boom", "batch-size": 1.0}, **{"batch-size": {"done": []}}
    )
    fixes = try_changes(runs, SEEN, ["fused", "batch-size", "attention"], rounds=2).fixes
    assert [one.untried for one in fixes] == [
        "the script ended with 1: boom",
        "it found nothing to change",
        "attention is not eager",
    ]
    assert all(one.gain is None and one.verdict == "not tried" for one in fixes)
    assert not try_changes(Trials({}), SEEN, [], rounds=1).fixes
    report = ProfileReport(SEEN, tuple(fixes))
    assert "not tried: it found nothing to change" in report.markdown()
    print_profile(report)
    assert "attention: not tried: attention is not eager\n" in capsys.readouterr().out
    again = ProfileReport.from_dict(json.loads(report.json()))
    assert again.fixes == report.fixes
    assert again.markdown() == report.markdown()


@pytest.mark.parametrize(("runs", "tried"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_an_unchanged_run_that_fails_leaves_what_was_tried(runs, tried):
    class Ending(Trials):
        def __call__(self, change):
            if self.order.count(None) == runs and change is None:
                raise RuntimeError("the script ended by itself")
            return super().__call__(change)

    seconds = {None: 1.0, "fused": 0.5, "batch-size": 0.5}
    fixes = try_changes(Ending(seconds), SEEN, ["fused", "batch-size"], rounds=2).fixes
    assert [one.gains for one in fixes] == [(2.0,)] * tried + [()] * (2 - tried)
    why = "a run without any change failed: the script ended by itself"
    assert [one.untried for one in fixes] == [None] * tried + [why] * (2 - tried)


def test_ctrl_c_leaves_what_was_tried():
    class Stopped(Trials):
        def __call__(self, change):
            if len(self.order) == 4:
                raise KeyboardInterrupt
            return super().__call__(change)

    found = try_changes(Stopped({None: 1.0, "fused": 0.5, "batch-size": 1.0}), SEEN, ["fused", "batch-size"], rounds=3)
    fused, batch = found.fixes
    assert found.interrupted
    assert fused.gains == (2.0,)
    assert batch.untried == "interrupted before its turn"


def test_loaders_with_workers_and_pinned_memory():
    """What the loader is given; nothing is loaded."""
    with CHANGES["prefetch"].made() as done:
        assert DataLoader([1], num_workers=1).prefetch_factor == 8
        assert DataLoader([1]).prefetch_factor is None
    assert done == ["prefetch_factor=8"]
    with CHANGES["pinning"].made() as done:
        assert DataLoader([1]).pin_memory
    assert done == ["pin_memory=True"]
    assert CHANGES["prefetch"].needless(SEEN) == "it has no workers"
    assert CHANGES["pinning"].needless(SEEN) == "there is no accelerator to copy to"
    assert CHANGES["pinning"].needless(replace(SEEN, device="cuda:0")) is None


def test_flash_attention_is_tried_where_it_can_be(monkeypatch):
    needless = CHANGES["flash"].needless
    assert needless(SEEN) == "no model of transformers with more than one implementation was seen"
    setup = replace(SEEN.setup, attention={"sdpa": 2}, asked=None)
    seen = replace(SEEN, setup=setup)
    assert needless(seen) == "FlashAttention has kernels for CUDA alone, and this run is on cpu"
    assert ProfileReport(seen).not_evaluable["flash attention"] == needless(seen)
    assert "Attention: sdpa in 2 modules." in ProfileReport(seen).markdown()
    on_cuda = replace(seen, device="cuda:0")
    monkeypatch.setattr(changes_module, "is_flash_attn_2_available", lambda: False)
    assert needless(on_cuda) == "the package flash-attn is not installed"
    monkeypatch.setattr(changes_module, "is_flash_attn_2_available", lambda: True)
    assert needless(on_cuda) == "FlashAttention computes in half precision, and this run does not"
    assert needless(replace(on_cuda, setup=replace(setup, asked="bfloat16"))) is None


def test_what_only_the_script_can_change():
    """Findings for which there is no change from outside are named beside those that were tried."""
    seen = planted.train("print").observation
    report = ProfileReport(seen, try_changes(Trials({None: 1.0, "compile": 1.0}), seen, ["compile"], rounds=1).fixes)
    (table,) = (rows for title, _, rows in report.tables() if title == "Only the script can change")
    assert [row[:2] for row in table] == [["print", f"tests/planted.py:{planted.line_of('print')}"]]
    assert "Only the script can change" not in ProfileReport(seen).markdown()
    assert set(CHECKS) >= MENDED


def test_compiling_is_tried_or_left_out():
    """Whichever the run does not do."""
    compiled = replace(SEEN, missing={"calls": "it is compiled"})
    assert CHANGES["no-compile"].needless(SEEN) == "nothing is compiled"
    assert CHANGES["compile"].needless(SEEN) is CHANGES["no-compile"].needless(compiled) is None
    assert CHANGES["compile"].needless(compiled) == "it is compiled"
    function = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    with CHANGES["no-compile"].made() as done:
        assert not function(torch.ones(1))
    assert done == ["torch.compile switched off"]


class Batches:
    """Made-up trials in which memory grows with the batch, and there is room for so much of it."""

    def __init__(self, begin=100, each=10, room=1000, fails_above=10**9, rows=10**9, seconds=1e-3):
        self.begin, self.each, self.room, self.fails_above = begin, each, room, fails_above
        self.rows, self.seconds, self.tried = rows, seconds, []

    def __call__(self, change):
        times = int("".join(filter(str.isdigit, change)) or 2) if change else 1
        self.tried.append(times)
        if times > self.fails_above:
            raise RuntimeError("the script ended with 1: out of memory")
        memory = self.begin + self.each * times
        largest = min(4 * times, self.rows)
        return Trial(["it"], [self.seconds * times], float(largest), largest, [1.0], memory, self.room)


@pytest.mark.parametrize(
    ("runs", "tried", "largest", "limit"),
    [
        (Batches(), [1, 2, 4, 64], 64, "none above 64 times is tried"),
        (Batches(each=50), [1, 2, 4, 16], 16, "by what smaller ones took, no larger one would fit"),
        # What was promised does not fit: half as much more than what did.
        (
            Batches(each=50, fails_above=9),
            [1, 2, 4, 16, 10, 7],
            7,
            "10 times as large: the script ended with 1: out of",
        ),
        (Batches(fails_above=3), [1, 2, 4], 2, "4 times as large: the script ended with 1: out of memory"),
        (Batches(rows=40), [1, 2, 4, 64, 34, 19], 4, "19 times as large: the largest batch that the data set gave"),
        (Batches(seconds=0.5), [1, 2, 4, 20], 20, "a step of a larger one would take more than 10 s"),
        (Batches(each=300), [1, 2, 4], 4, "by what smaller ones took, no larger one would fit"),
    ],
)
def test_the_largest_batch_that_fits(runs, tried, largest, limit):
    found = try_batch_sizes(runs)
    assert runs.tried == tried
    assert found.largest == largest
    assert found.limit.startswith(limit)
    assert [one.times for one in found.tried] == sorted(tried)
    assert all(one.memory == runs.begin + runs.each * one.times for one in found.tried if one.failed is None)


def test_batch_headroom_is_what_was_measured():
    """A finding where a larger batch is faster in all rounds, and none where it is not."""
    sizes = try_batch_sizes(Batches(each=50))
    names = expanded(["fused", "largest-batch"], sizes)
    assert names == ["fused", "batch-size", "batch-size-4x", "batch-size-16x"]
    seconds = {None: 1.0, "fused": 1.0, "batch-size": 0.9, "batch-size-4x": 0.5, "batch-size-16x": 0.6}
    fixes = try_changes(Trials(seconds), SEEN, names, rounds=2).fixes
    report = ProfileReport(with_gains(sizes, fixes, SEEN), fixes)
    (found,) = (one for one in report.findings if one.kind == "batch headroom")
    assert "2x 1.11, 4x 2.00, 16x 1.67. The largest that was tried is 16x" in found.evidence
    assert found.remedy.startswith("a batch 4 times as large was fastest")
    assert "| 16x | 64 | 1.67 |" in report.markdown()
    assert ProfileReport.from_dict(json.loads(report.json())).markdown() == report.markdown()
    slower = try_changes(Trials(dict.fromkeys(seconds, 1.0)), SEEN, names, rounds=2).fixes
    report = ProfileReport(with_gains(sizes, slower, SEEN), slower)
    assert "batch headroom" not in {one.kind for one in report.findings} | set(report.not_evaluable)
    none = with_gains(try_batch_sizes(Batches(fails_above=1)), (), SEEN)
    assert (
        ProfileReport(none)
        .not_evaluable["batch headroom"]
        .startswith("no larger batch could be measured: 2 times as large: the script ended with 1: out of memory")
    )


def test_where_the_largest_batch_cannot_be_looked_for():
    assert unknown_room(SEEN) is None
    assert unknown_room(replace(SEEN, device="mps:0")) == "the free memory of mps:0 is not known"
    assert unknown_room(replace(SEEN, loaders=())) == "no torch DataLoader was used"
    assert "--fix largest-batch runs larger ones" in ProfileReport(SEEN).not_evaluable["batch headroom"]


def test_a_trial_is_ended_before_the_machine_has_no_memory(script, monkeypatch):
    script.write_text("import time; time.sleep(60)")
    rooms = iter([1000])
    monkeypatch.setattr(fixes_module, "available_bytes", lambda _: next(rooms, 40))
    with pytest.raises(RuntimeError, match="out of memory: hardly any was left"):
        in_processes(str(script), [], Schedule())(None)


def test_the_peak_of_a_stretch():
    """Anew from where it begins, and what was higher before is not forgotten."""
    device = torch.device("cpu")
    torch.ones(2**26)
    whole = peak_resident_bytes()
    if not begin_peak(device):
        pytest.skip("this system does not count the peak anew")
    before = peak_bytes(device)
    held = torch.ones(2**25)  # large beside what is free in the heap already
    assert held.nbytes * 0.9 < peak_bytes(device) - before < held.nbytes * 2
    assert peak_resident_bytes() >= whole > before


def test_a_peak_of_cuda_that_was_counted_anew_is_not_forgotten(monkeypatch):
    """As if there were a device."""
    counted = [700]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: counted[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: counted.append(10))
    monkeypatch.setattr(peak_module, "_highest", {})
    assert begin_peak(torch.device("cuda", 0))
    assert (peak_bytes(torch.device("cuda", 0)), peak_allocated_bytes()) == (10, 700)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fix", "faster"], "--fix faster: there is no such change; it is one of workers, prefetch"),
        (["--rounds", "2"], "--rounds has no effect without --fix"),
        (["--fix", "--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(flags, said, capsys):
    assert main(["profile", "script", __file__, *flags]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "flags", "other"),
    [
        ("script", ["--json", "{}"], "the script"),
        ("script", ["--markdown", "new.md", "--json", "new.md"], "--json"),
        ("trace", ["--html", "{}"], "the trace"),
    ],
)
def test_a_report_is_written_over_nothing_that_the_command_reads_or_writes(what, flags, other, tmp_path, capsys):
    subject = tmp_path / "subject.py"
    subject.write_text("print(1)")
    named = [str(tmp_path / "new.md") if one == "new.md" else one.format(subject) for one in flags]
    assert main(["profile", what, str(subject), *named]) == 1
    assert f"this would overwrite {other}. Name another file" in capsys.readouterr().err
    assert subject.read_text() == "print(1)"


def test_an_option_of_the_script_in_front_of_the_dashes(capsys):
    with pytest.raises(SystemExit):
        main(["profile", "script", __file__, "--epochs", "1"])
    assert "no option --epochs; if it is the script's, write it behind --; see" in capsys.readouterr().err


@pytest.mark.slow
def test_fixes_of_a_script(script, tmp_path):
    """A loader that sleeps: workers pay, as the command line says."""
    script.write_text(LOOP.format(sleep=5e-3))
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "gradprobe_hf", "profile", "script", str(script), "--json", str(path)]
    subprocess.run([*command, "--timed", "6", "--fix", "workers", "fused", "--rounds", "1"], check=True, cwd=ROOT)
    workers, fused = ProfileReport.read(path).fixes
    assert workers.verdict == "one round alone does not tell"
    assert workers.gain > 1.2
    assert workers.loss == "the same within 0"
    assert fused.gains
    assert set(CHANGES) >= {workers.change, fused.change}
