"""A run that is killed, at any moment, and started again ends with the same masks, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal

import gradprobe_hf.run.memory_plan as execution
import gradprobe_hf.run.snapshots as resume
import pytest
import torch
from safetensors import SafetensorError

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.model.loss import summed_loss
from tests import cases
from tests.launch import files_of, in_child, survivors, together


def run(folder=None, *, model=None, parts=None, loss_fn=None, **options):
    result = prune_pretrained(
        model or cases.build("llama"),
        GradProbeConfig(**options),
        calibration=parts or cases.batches("llama", rows=12, batch_size=1),
        evaluation=cases.batches("llama", seed=7) if "max_metric_drop" in options else False,
        loss_fn=loss_fn,
        apply=False,
        resume_dir=folder,
        save_every=2,
        progress=False,
    )
    return {
        "masks": {name: mask.clone() for name, mask in result.masks.items()},
        "probes": result.report.probes,
        "updates": {name: result.updates[name].clone() for name in result.updates},
        "no_evidence": [row.no_evidence for row in result.report.matrices],
        "scores": [(row.score_min, row.score_max) for row in result.report.matrices],
    }


def assert_same(found, wanted):
    assert found["masks"].keys() == wanted["masks"].keys()
    for name, mask in wanted["masks"].items():
        assert torch.equal(found["masks"][name], mask), name
    assert found["updates"].keys() == wanted["updates"].keys()
    for name, values in wanted["updates"].items():
        assert torch.equal(found["updates"][name], values), name
    for key in ("probes", "no_evidence", "scores"):
        assert found[key] == wanted[key]


def dying(folder, moment, options, where):
    """Run until the `moment`-th call of something that every stage does often, then SIGKILL this process."""
    calls = []

    def counted(real):
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    owner, name = where
    setattr(owner, name, counted(getattr(owner, name)))
    run(folder, **options)


OPTIONS = {
    "path": {"sparsity": 0.5},
    "int8 on disk": {"sparsity": 0.5, "accumulator_dtype": "int8", "accumulator_device": "disk"},
    "bfloat16": {"sparsity": 0.5, "fisher": "token", "accumulator_dtype": "bfloat16"},
    "rounds": {"rounds": (0.2, 0.5)},
    "sequential": {"sparsity": 0.5, "order": "sequential"},
    "sequential, admm": {"sparsity": 0.5, "order": "sequential", "reconstruction": "admm"},
    "threshold": {"sparsity": 0.6, "decision": "threshold", "gradient_threshold": 0.2},
    "search, admm": {"max_metric_drop": "0.2%", "sparsity": 0.9, "sparsity_step": 0.3, "reconstruction": "admm"},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_killed_at_ten_random_moments_it_ends_the_same(kind, tmp_path):
    """The loss of each batch, the saving of each file and each step of a selection are moments to die at."""
    options, folder = OPTIONS[kind], tmp_path / "state"
    wanted = run(**options)
    draw = random.Random(kind)
    owners = {
        "batch": ("gradprobe_hf.probe.engine", "summed_loss", 7),
        "file": ("gradprobe_hf.run.snapshots", "save_file", 60),
        "rename": ("gradprobe_hf.run.snapshots", "_flush", 4),
        "selection": ("gradprobe_hf.selection.select", "find_cut", 1),
        "scores": ("gradprobe_hf.decisions.decision", "score_keys", 80),
    }
    killed = 0
    for _ in range(10):
        module, name, most = owners[draw.choice(list(owners))]
        owner = __import__(module, fromlist=[name])
        code = in_child(lambda: dying(folder, draw.randint(1, most), options, (owner, name)))  # noqa: B023
        assert code in (0, -signal.SIGKILL)
        killed += code == -signal.SIGKILL
    assert killed >= 5
    assert_same(run(folder, **options), wanted)
    assert not folder.exists(), "a finished run leaves no state behind"


def test_killed_by_the_clock(tmp_path):
    """Not at a call of ours, but wherever the processor is after so many milliseconds."""
    wanted = run(sparsity=0.5)
    draw = random.Random(1)
    for _ in range(10):
        in_child(lambda: run(tmp_path / "state", sparsity=0.5), killed_after=draw.uniform(0.02, 0.6))
    assert_same(run(tmp_path / "state", sparsity=0.5), wanted)


def test_what_was_done_is_not_done_again(tmp_path, monkeypatch):
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 18:  # the sixth batch of the second probe
            raise RuntimeError("on purpose")
        return summed_loss(model, batch)[0]

    wanted = run(loss_fn=lambda model, batch: summed_loss(model, batch)[0], sparsity=0.5)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(tmp_path / "state", loss_fn=failing, sparsity=0.5)
    state = tmp_path / "state" / "process-0"
    assert [path.name for path in state.iterdir()] == ["probe 1-4"]
    assert_same(run(tmp_path / "state", loss_fn=failing, sparsity=0.5), wanted)
    assert len(calls) == 18 + 8, "batches 5 to 12 of the second probe, and none of the first"


def interrupted(folder, **options):
    """Leaves a state behind."""
    with pytest.raises(RuntimeError, match="on purpose"):
        run(folder, loss_fn=failing_at(5), **options)


def failing_at(number):
    """A loss that cannot be computed once: of the batch with this number, from 1."""
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == number:
            raise RuntimeError("on purpose")
        return summed_loss(model, batch)[0]

    return failing


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sparsity": 0.6}, "config.sparsity was 0.5, now it is 0.6"),
        ({"sparsity": 0.5, "fisher": "token"}, "config.fisher was 'blend', now it is 'token'"),
        ({"sparsity": 0.5, "parts": cases.batches("llama", rows=12, batch_size=1, seed=9)}, "calibration was"),
        ({"sparsity": 0.5, "parts": cases.batches("llama", rows=12, batch_size=2)}, "batches was 12, now it is 6"),
        ({"sparsity": 0.5, "model": cases.build("llama", seed=1)}, "weights was"),
        ({"sparsity": 0.5, "model": cases.build("llama", torch.bfloat16)}, "weights was"),
        ({"sparsity": 0.5, "model": cases.build("opt")}, "model was 'LlamaForCausalLM', now it is 'OPTForCausalLM'"),
    ],
    ids=["sparsity", "fisher", "text", "batches", "weights", "dtype", "model"],
)
def test_a_state_of_something_else_is_refused_with_the_difference(change, named, tmp_path):
    interrupted(tmp_path / "state", sparsity=0.5)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"state of another run") as caught:
        run(tmp_path / "state", **change)
    assert named in str(caught.value)
    assert "--resume-dir" in str(caught.value)
    assert files_of(tmp_path) == before


def test_a_state_half_deleted_is_not_a_state(tmp_path, monkeypatch):
    """Killed while an older state is being removed: what is left of it must not be taken for one."""
    real = resume.shutil.rmtree

    def killed(path, *args, **kwargs):
        if path.name.startswith("probe 0-4"):
            (path / "progress.json").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, *args, **kwargs)

    def doomed():
        monkeypatch.setattr(resume.shutil, "rmtree", killed)
        run(tmp_path / "state", sparsity=0.5)

    assert in_child(doomed) == -signal.SIGKILL
    assert_same(run(tmp_path / "state", sparsity=0.5), run(sparsity=0.5))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_state_half_written_is_not_a_state(error, tmp_path, monkeypatch):
    real, calls = resume.save_file, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > 40:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(resume, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        run(tmp_path / "state", sparsity=0.5)
    monkeypatch.undo()
    complete = list((tmp_path / "state" / "process-0").iterdir())
    assert len(complete) == 1, "and nothing of the one that did not fit"
    assert json.loads((complete[0] / "progress.json").read_text())["losses"] is not None
    assert_same(run(tmp_path / "state", sparsity=0.5), run(sparsity=0.5))


@pytest.mark.parametrize("save_every", [0, -1, 2.5, True, "2"])
def test_save_every_is_checked(save_every, tmp_path):
    with pytest.raises(ValueError, match="save_every must be a whole number"):
        prune_pretrained(cases.build("llama"), resume_dir=tmp_path, save_every=save_every)


def one_of_two(folder, stop_at):
    """Each process ends in its own batch `stop_at`, one of them a batch later, unless it lost the other before."""
    calls = []
    late = torch.distributed.get_rank()

    def loss_fn(model, batch):
        calls.append(1)
        if stop_at is not None and len(calls) == stop_at + late:
            os._exit(9)
        return summed_loss(model, batch)[0]

    return run(folder, loss_fn=loss_fn, sparsity=0.5)


@pytest.mark.parametrize("stop_at", [3, 6, 9], ids=["probe 0", "between", "probe 1"])
def test_two_processes_go_on_together(stop_at, tmp_path):
    wanted = together(one_of_two, None, None)[0]
    assert 0 not in survivors(one_of_two, tmp_path / "state", stop_at)
    assert (tmp_path / "state").exists()
    for found in together(one_of_two, tmp_path / "state", None):
        assert_same(found, wanted)


def test_the_largest_batch_is_not_looked_for_again(tmp_path, monkeypatch):
    """Free memory is another now: the run that goes on has the batches that it began with."""
    first = execution.first_guess
    monkeypatch.setattr(execution, "first_guess", lambda *_: 4)
    interrupted(tmp_path / "state", sparsity=0.5, batch_size="auto")
    monkeypatch.setattr(execution, "first_guess", lambda *_: pytest.fail("looked for"))
    unfinished = tmp_path / "state" / "process-0" / "probe 0-8.partial"
    unfinished.mkdir()
    (unfinished / "progress.json").write_text('{"identity": {"rows')  # killed while it was written
    found = run(tmp_path / "state", sparsity=0.5, batch_size="auto")
    monkeypatch.setattr(execution, "first_guess", first)
    wanted = run(sparsity=0.5, parts=cases.batches("llama", rows=12, batch_size=4))
    assert all(torch.equal(found["masks"][name], mask) for name, mask in wanted["masks"].items())


def test_a_search_on_another_text_is_another_run(tmp_path):
    def search(evaluation, **others):
        return prune_pretrained(
            cases.build("llama"),
            GradProbeConfig(sparsity=0.5, max_metric_drop=1e9, sparsity_step=0.25),
            calibration=cases.batches("llama", rows=4, batch_size=1),
            evaluation=evaluation,
            apply=False,
            resume_dir=tmp_path / "state",
            save_every=1,
            progress=False,
            **others,
        )

    with pytest.raises(RuntimeError, match="on purpose"):
        search(cases.batches("llama", seed=3), loss_fn=failing_at(9))
    with pytest.raises(ValueError, match="its evaluation was"):
        search(cases.batches("llama", seed=4))


def test_what_probes_nothing_says_that_it_is_not_resumed(tmp_path, caplog):
    run(tmp_path / "state", strategy="magnitude", decision="none")
    assert "resume_dir is not used: nothing is probed" in caplog.text
    assert not (tmp_path / "state").exists()
