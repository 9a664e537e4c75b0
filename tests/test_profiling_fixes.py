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
from gradprobe_hf.cli.profile_table import print_profile
from gradprobe_hf.profiling import ProfileReport
from gradprobe_hf.profiling.fixing.changes import CHANGES
from gradprobe_hf.profiling.fixing.fixes import try_changes
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
        plain = {"done": ["it"] if change else [], "samples": 4.0, "losses": [2.0, 1.0], "memory": 100}
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
        ({"fused": {"losses": [2.0, math.nan]}}, "not comparable: a loss is no number"),
        ({"batch-size": {"losses": [3.0]}}, "other batches: not comparable step by step"),
    ],
)
def test_losses_are_compared(more, said):
    (name,) = more
    (fix,) = try_changes(Trials({None: 1.0, name: 1.0}, **more), SEEN, [name], rounds=1).fixes
    assert fix.loss == said


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
    with pytest.raises(RuntimeError, match="the script ended with 2"):
        try_changes(Trials({None: "the script ended with 2"}), SEEN, ["fused"], rounds=1)


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


@pytest.mark.slow
def test_fixes_of_a_script(script, tmp_path):
    """A loader that sleeps: workers pay, as the command line says."""
    script.write_text(LOOP.format(sleep=5e-3))
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "gradprobe_hf", "profile", "script", str(script), "--json", str(path)]
    subprocess.run([*command, "--timed", "6", "--fix", "workers", "fused", "--rounds", "1"], check=True, cwd=ROOT)
    workers, fused = ProfileReport.read(path).fixes
    assert workers.verdict == "pays"
    assert workers.gain > 1.2
    assert workers.loss == "the same within 0"
    assert fused.gains
    assert set(CHANGES) >= {workers.change, fused.change}
