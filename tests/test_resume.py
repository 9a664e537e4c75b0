"""A run that is killed, at any moment, and started again ends with the same masks, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from safetensors import SafetensorError

from gradprobe_hf import prune_pretrained
from gradprobe_hf.memory import batch_size, measured_passes
from gradprobe_hf.model.fingerprint import weights_fingerprint
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.reconstruction.reconstruct import Reconstructed
from gradprobe_hf.run import snapshots
from gradprobe_hf.run.shapes import search
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.scratch import alone_in
from tests import cases
from tests.grids import some
from tests.launch import files_of, in_child, survivors, together
from tests.test_fsdp import sharded

BATCHES = 8


@pytest.fixture(autouse=True)
def nothing_is_flushed(monkeypatch):
    """A kill takes nothing from the page cache, and hundreds of small files take seconds to get to a disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def run(folder=None, *, model=None, parts=None, loss_fn=None, **options):
    result = prune_pretrained(
        model or cases.build("llama"),
        cases.config(**{"save_every": 2, **options}),
        calibration=parts or cases.batches("llama", rows=BATCHES, batch_size=1),
        evaluation=cases.batches("llama", seed=7) if "max_metric_drop" in options else False,
        loss_fn=loss_fn,
        apply=False,
        resume_dir=folder,
        progress=False,
    )
    return {
        "masks": {name: mask.clone() for name, mask in result.masks.items()},
        "probes": result.report.probes,
        "passes": result.report.passes,
        "structure": result.report.structure,
        "new_weights": {name: result.new_weights[name].clone() for name in result.new_weights},
        "no_evidence": [row.no_evidence for row in result.report.matrices],
        "scores": [(row.score_min, row.score_max) for row in result.report.matrices],
    }


def assert_same(found, wanted):
    for kind in ("masks", "new_weights"):
        assert found[kind].keys() == wanted[kind].keys()
        for name, values in wanted[kind].items():
            assert torch.equal(found[kind][name], values), name
    for key in ("probes", "structure", "no_evidence", "scores"):
        assert found[key] == wanted[key]


# What every stage does often.
MOMENTS = {
    "batch": ("gradprobe_hf.probe.engine", "summed_loss"),
    "file": ("gradprobe_hf.run.snapshots", "save_file"),
    "rename": ("gradprobe_hf.run.snapshots", "_flush"),
    "drop": ("gradprobe_hf.run.snapshots", "_drop"),
    "selection": ("gradprobe_hf.run.probing.pair_masks", "select_masks"),
    "block": ("gradprobe_hf.reconstruction.reconstruct", "solve_block"),
    "amount": ("gradprobe_hf.run.shapes.estimates", "loss_of_few_rows"),
}


@contextmanager
def watched(kind, at=None, then=None):
    """Count the calls of a moment; in the `at`-th do something else first.

    Every run begins with a batch to see what it reaches, also one that goes on: that one does not count.
    """
    module, name = MOMENTS[kind]
    owner, calls, before = import_module(module), [], [1] if kind == "batch" else []
    real = getattr(owner, name)

    def call(*args, **kwargs):
        if before:
            before.pop()
            return real(*args, **kwargs)
        calls.append(1)
        if len(calls) == at:
            then()
        return real(*args, **kwargs)

    with patch.object(owner, name, call):
        yield calls


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(folder, kind, moment, **options):
    """The exit code of a run that is killed at a moment, if it gets there."""

    def dying():
        tempfile.tempdir = str(folder.parent)  # what it leaves is for nobody to tidy up
        with watched(kind, moment, die):
            run(folder, **options)

    return in_child(dying)


def states(folder, rank=0):
    """The complete ones, by name."""
    own = folder / f"process-{rank}"
    return sorted(path.name for path in own.iterdir() if path.suffix != ".partial") if own.exists() else []


@contextmanager
def going_on():
    """For the body of the `with`: a run that has to go on from a state."""
    real, reads = snapshots.Snapshots.read, []
    with patch.object(snapshots.Snapshots, "read", lambda self, step: reads.append(step) or real(self, step)):
        yield
    assert reads, "it began anew"


OPTIONS = {
    "path": {"sparsity": 0.5},
    "int8 on disk": {"sparsity": 0.5, "accumulator_dtype": "int8", "accumulator_device": "disk"},
    "bfloat16": {"sparsity": 0.5, "fisher": "token", "accumulator_dtype": "bfloat16"},
    "rounds": {"rounds": (0.2, 0.5)},
    "sequential": {"sparsity": 0.5, "order": "sequential"},
    "sequential, admm": {"sparsity": 0.5, "order": "sequential", "update": "admm"},
    "threshold": {"sparsity": 0.6, "rule": "threshold", "gradient_threshold": 0.2},
    "search, admm": {"max_metric_drop": "0.2%", "sparsity": 0.9, "sparsity_step": 0.45, "update": "admm"},
    "one probe, admm": {"sparsity": 0.5, "probes": 1, "update": "admm"},
    "sparsegpt": {"sparsity": 0.5, "update": "sparsegpt"},
    "blocks": {"sparsity": 0.5, "score": "magnitude", "refinement": "blocks"},
    "structures": {"structure": {"ffn": 8, "kv_groups": 1}},
    "blocks and channels": {"structure": {"ffn": 8, "blocks": 1}, "update": "none"},
    "shapes": {"structure": "auto", "params": 0.9},
}
# Where each is killed, once after the other; every one of these moments comes, and has a state before it.
KILLS = {
    "path": [("batch", 5), ("file", 30), ("rename", 2)],
    "int8 on disk": [("batch", 13), ("drop", 1)],
    "bfloat16": [("selection", 2)],
    "rounds": [("batch", 21)],
    "sequential": [("batch", 27)],
    "sequential, admm": [("block", 2)],
    "threshold": [("batch", 13)],
    "search, admm": [("block", 4)],
    "one probe, admm": [("rename", 7)],
    "sparsegpt": [("block", 2), ("file", 1)],
    "blocks": [("block", 2)],
    "structures": [("block", 2)],
    "blocks and channels": [("batch", 3)],
    "shapes": [("block", 2), ("batch", 12)],
}


@cache
def whole(kind):
    """What a run that is not killed ends with."""
    return run(**OPTIONS[kind])


@some("kind", OPTIONS, fast=("int8 on disk", "sequential, admm"))
def test_killed_it_ends_the_same(kind, tmp_path):
    options, folder = OPTIONS[kind], tmp_path / "state"
    for moment in KILLS[kind]:
        assert killed(folder, *moment, **options) == -signal.SIGKILL
        assert states(folder), "it left no state behind"
    with going_on():
        assert_same(run(folder, **options), whole(kind))
    assert not folder.exists(), "a finished run leaves no state behind"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_killed_at_ten_random_moments_it_ends_the_same(kind, tmp_path):
    options, folder = OPTIONS[kind], tmp_path / "state"
    draw = random.Random(kind)
    most = {"batch": 7, "file": 60, "rename": 4, "drop": 3, "selection": 1, "block": 2}
    codes = []
    for _ in range(10):
        moment = draw.choice(list(most))
        codes.append(killed(folder, moment, draw.randint(1, most[moment]), **options))
        assert codes[-1] in (0, -signal.SIGKILL)
        assert bool(states(folder)) <= (codes[-1] != 0), "a finished run leaves no state behind"
    assert codes.count(-signal.SIGKILL) >= 2  # a run without probes never comes to most of the moments
    if not states(folder):
        assert killed(folder, *KILLS[kind][0], **options) == -signal.SIGKILL
    with going_on():
        assert_same(run(folder, **options), whole(kind))
    assert not folder.exists()


@pytest.mark.slow
def test_killed_by_the_clock(tmp_path):
    """Not at a call of ours, but wherever the processor is after so many milliseconds."""
    draw = random.Random(1)
    codes = [
        in_child(lambda: run(tmp_path / "state", sparsity=0.5), killed_after=draw.uniform(0.02, 0.3)) for _ in range(15)
    ]
    assert set(codes) <= {0, -signal.SIGKILL}
    assert codes.count(-signal.SIGKILL) >= 2  # a run without probes never comes to most of the moments
    assert_same(run(tmp_path / "state", sparsity=0.5), whole("path"))


@pytest.mark.parametrize("kind", ["one probe, admm", "sparsegpt", "blocks", "structures"])
def test_a_run_killed_in_its_reconstruction_goes_on_behind_the_finished_blocks(kind, tmp_path):
    options, folder = OPTIONS[kind], tmp_path / "state"
    with watched("block") as solved, watched("batch") as probed:
        wanted = run(**options)
    assert len(solved) == 3
    # Channels go by the Fisher information of their gates, which takes a probe.
    assert len(probed) == (BATCHES if kind in ("one probe, admm", "structures") else 0)
    assert killed(folder, "block", 3, **options) == -signal.SIGKILL
    assert states(folder) == ["block-0-0", "block-1-0", "decision-0-0"]
    with going_on(), watched("block") as solved, watched("batch") as probed:
        found = run(folder, **options)
    assert_same(found, wanted)
    assert len(found["new_weights"]) == len(wanted["new_weights"]) >= len(wanted["masks"]) == len(found["masks"])
    assert (len(solved), len(probed)) == (1, 0), "the third block, and no probe"
    assert not folder.exists()


SEARCHES = {
    "estimates": (("amount", 2), 2, (4, 7)),
    "first trial": (("block", 2), 4, (0, 7)),
    "second trial": (("block", 4), 6, (0, 4)),
    "reconstruction": (("block", 7), None, (0, 1)),
}


@some("moment", SEARCHES, fast=("second trial",))
def test_what_a_search_for_a_shape_has_measured_is_not_measured_again(moment, tmp_path, monkeypatch):
    """`saved`: what it has found when it is killed; `left`: amounts and blocks of those that go on."""
    moment, saved, left = SEARCHES[moment]
    monkeypatch.setattr(search, "TRIED", 2)  # of four shapes: what each loses is estimated first
    options, folder = {"structure": "auto", "params": 0.85}, tmp_path / "state"
    wanted = run(**options)
    assert killed(folder, *moment, **options) == -signal.SIGKILL
    found = [state for state in states(folder) if state.startswith("search")]
    assert len(found) == (saved or 0)
    with going_on(), watched("amount") as amounts, watched("block") as solved:
        again = run(folder, **options)
    assert_same(again, wanted)
    assert again["passes"] == wanted["passes"]
    assert (len(amounts), len(solved)) == left
    assert not folder.exists()


def test_finished_blocks_are_read_one_at_a_time(tmp_path, monkeypatch):
    """All of them would be a whole model in memory, which may have room for one block."""
    options, folder, order, wanted = OPTIONS["sparsegpt"], tmp_path / "state", [], whole("sparsegpt")
    assert killed(folder, "block", 3, **options) == -signal.SIGKILL
    read, take = snapshots.Snapshots.read, Reconstructed.take
    monkeypatch.setattr(snapshots.Snapshots, "read", lambda self, step: order.append(step.stage) or read(self, step))
    monkeypatch.setattr(Reconstructed, "take", lambda *args: order.append("take") or take(*args))
    assert_same(run(folder, **options), wanted)
    assert order == ["decision", "block", "take", "block", "take", "take"]


def test_a_block_half_written_is_not_a_block(tmp_path):
    """Killed between the weights of a block and its masks."""
    options, folder = OPTIONS["sparsegpt"], tmp_path / "state"
    assert killed(folder, "file", 4, **options) == -signal.SIGKILL
    assert states(folder) == ["block-0-0", "decision-0-0"]
    assert (folder / "process-0" / "block-1-0.partial" / "weights.safetensors").exists()
    with going_on(), watched("block") as solved:
        found = run(folder, **options)
    assert_same(found, whole("sparsegpt"))
    assert len(solved) == 2, "the second block and the third"


def test_what_was_done_is_not_done_again(tmp_path):
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 1 + 14:  # behind the first pass, the sixth batch of the second probe
            raise RuntimeError("on purpose")
        return summed_loss(model, batch)[0]

    wanted = run(loss_fn=lambda model, batch: summed_loss(model, batch)[0], sparsity=0.5)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(tmp_path / "state", loss_fn=failing, sparsity=0.5)
    assert states(tmp_path / "state") == ["probe-1-4"]
    assert_same(run(tmp_path / "state", loss_fn=failing, sparsity=0.5), wanted)
    assert len(calls) == 15 + 1 + 4, "batches 5 to 8 of the second probe, and none of the first"


def test_a_state_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A power cut must not leave a name without content."""
    flushed, states_made, real = [], [], Path.rename

    def rename(self, target):
        if self.suffix == ".partial":
            inside = sorted(path.stat().st_ino for path in self.iterdir())
            assert sorted(flushed) == inside
            states_made.append(len(inside))
            flushed.clear()
        return real(self, target)

    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.fstat(number).st_ino))
    monkeypatch.setattr(Path, "rename", rename)
    run(tmp_path / "state", update="sparsegpt")
    assert states_made == [1, 3, 3, 3], "of the decision, and of three blocks with weights and masks"


def test_how_often_it_is_saved_may_change(tmp_path):
    assert killed(tmp_path / "state", "batch", 8, sparsity=0.5) == -signal.SIGKILL
    with going_on():
        assert_same(run(tmp_path / "state", sparsity=0.5, save_every=5), whole("path"))


def interrupted(folder, **options):
    """Leaves a state behind."""
    with pytest.raises(RuntimeError, match="on purpose"), patch("gradprobe_hf.probe.engine.summed_loss", failing_at(5)):
        run(folder, **options)


def failing_at(number):
    """A loss that cannot be computed once: of the batch with this number, from 1, behind the one that is run first."""
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 1 + number:
            raise RuntimeError("on purpose")
        return summed_loss(model, batch)

    return failing


def edited():
    """A model of the same weights that computes something else, by its configuration."""
    model = cases.build("llama")
    model.config.rms_norm_eps = 0.5
    return model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sparsity": 0.6}, "config.sparsity was 0.5, now it is 0.6"),
        ({"sparsity": 0.5, "fisher": "token"}, "config.fisher was 'blend', now it is 'token'"),
        ({"sparsity": 0.5, "parts": cases.batches("llama", rows=BATCHES, batch_size=1, seed=9)}, "calibration was"),
        ({"sparsity": 0.5, "parts": cases.batches("llama", rows=BATCHES, batch_size=2)}, "batches was 8, now it is 4"),
        ({"sparsity": 0.5, "model": cases.build("llama", seed=1)}, "weights was"),
        ({"sparsity": 0.5, "model": cases.build("llama", torch.bfloat16)}, "weights was"),
        ({"sparsity": 0.5, "model": edited()}, "weights was"),
        ({"sparsity": 0.5, "model": cases.build("opt")}, "model was 'LlamaForCausalLM', now it is 'OPTForCausalLM'"),
    ],
    ids=["sparsity", "fisher", "text", "batches", "weights", "dtype", "configuration", "model"],
)
def test_a_state_of_something_else_is_refused_with_the_difference(change, named, tmp_path):
    interrupted(tmp_path / "state", sparsity=0.5)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"state of another run") as caught:
        run(tmp_path / "state", **change)
    assert named in str(caught.value)
    assert "--resume-dir" in str(caught.value)
    assert files_of(tmp_path) == before


def half_loss(model, batch):
    return summed_loss(model, batch)[0] / 2


def test_seconds_are_those_of_all_processes_that_worked_on_it(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 10))  # ten seconds go by whenever somebody looks
    monkeypatch.setattr("gradprobe_hf.runtime.stopwatch.time.perf_counter", lambda: float(next(clock)))
    failing = failing_at(13)  # in the second probe
    options = {"sparsity": 0.5, "save_every": 2}
    model, parts = cases.build("llama"), cases.batches("llama", rows=BATCHES, batch_size=1)
    with pytest.raises(RuntimeError, match="on purpose"), patch("gradprobe_hf.probe.engine.summed_loss", failing):
        cases.prune(model, parts, resume_dir=tmp_path / "state", **options)
    (state,) = (tmp_path / "state" / "process-0").glob("probe-1-*")
    earlier = json.loads((state / "state.json").read_text())["seconds"]
    assert earlier["probe 0"] >= 10
    assert earlier["probe 1"] >= 10
    result = cases.prune(model, parts, resume_dir=tmp_path / "state", **options)
    assert result.report.timings["probe 0"] == earlier["probe 0"], "it was not made again"
    assert result.report.timings["probe 1"] >= earlier["probe 1"] + 10


def test_so_is_the_highest_memory(tmp_path, monkeypatch):
    failing = failing_at(13)
    model, parts = cases.build("llama"), cases.batches("llama", rows=BATCHES, batch_size=1)
    options = {"sparsity": 0.5, "save_every": 2, "resume_dir": tmp_path / "state"}
    monkeypatch.setattr("gradprobe_hf.estimation.peak.peak_resident_bytes", lambda: 10**15)
    with pytest.raises(RuntimeError, match="on purpose"), patch("gradprobe_hf.probe.engine.summed_loss", failing):
        cases.prune(model, parts, **options)
    monkeypatch.undo()
    assert cases.prune(model, parts, **options).report.memory["peak_resident_bytes"] == 10**15


@pytest.mark.parametrize(("loss_fn", "named"), [(None, "None"), (partial(half_loss), "'half_loss'")])
def test_a_state_of_another_loss_is_refused(loss_fn, named, tmp_path):
    failing = failing_at(5)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(tmp_path / "state", loss_fn=lambda *given: failing(*given)[0], sparsity=0.5)
    with pytest.raises(ValueError, match=rf"its loss_fn was '.*<lambda>', now it is {named}"):
        run(tmp_path / "state", loss_fn=loss_fn, sparsity=0.5)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight", "embed_tokens.weight"])
def test_the_fingerprint_sees_what_a_short_training_changed(name):
    """Gains alone (as BitFit trains), a matrix, or an embedding, the rows in its middle."""
    model, changed = cases.build("llama"), cases.build("llama")
    assert weights_fingerprint(model) == weights_fingerprint(changed)
    with torch.no_grad():
        weight = changed.model.get_parameter(name)
        weight[len(weight) // 4 : -1] += 1e-3
    assert weights_fingerprint(model) != weights_fingerprint(changed)


def test_the_fingerprint_is_the_same_wherever_weights_are(tmp_path):
    """Tied weights are separate parameters once a model is offloaded."""
    model = cases.build("opt")
    wanted = weights_fingerprint(model)
    assert weights_fingerprint(cpu_offload(cases.build("opt"))) == wanted
    assert weights_fingerprint(disk_offload(cases.build("opt"), str(tmp_path))) == wanted


def test_a_state_half_deleted_is_not_a_state(tmp_path):
    """Killed while an older state is being removed: what is left of it must not be taken for one."""
    real = snapshots.shutil.rmtree

    def fatal(path, *args, **kwargs):
        if path.name.startswith("probe-0-4"):
            (path / "state.json").unlink()
            die()
        real(path, *args, **kwargs)

    def doomed():
        with patch.object(snapshots.shutil, "rmtree", fatal):
            run(tmp_path / "state", sparsity=0.5)

    assert in_child(doomed) == -signal.SIGKILL
    assert states(tmp_path / "state") == ["probe-0-6"]
    with going_on():
        assert_same(run(tmp_path / "state", sparsity=0.5), whole("path"))


@pytest.mark.parametrize("removed", range(4))
def test_killed_while_the_state_is_removed_at_the_end_it_goes_on(removed, tmp_path):
    kind, real, finish, calls = "sequential, admm", snapshots.shutil.rmtree, snapshots.Snapshots.finish, []

    def fatal(path, *args, **kwargs):
        if len(calls) == removed:
            next(one for one in path.rglob("*") if one.is_file()).unlink()
            die()
        calls.append(path)
        real(path, *args, **kwargs)

    def fatally(*args):
        with patch.object(snapshots.shutil, "rmtree", fatal):
            finish(*args)

    def doomed():
        with patch.object(snapshots.Snapshots, "finish", fatally):
            run(tmp_path / "state", **OPTIONS[kind])

    assert in_child(doomed) == -signal.SIGKILL
    assert (tmp_path / "state").exists()
    assert_same(run(tmp_path / "state", **OPTIONS[kind]), whole(kind))
    assert not (tmp_path / "state").exists()


def test_killed_behind_its_checkpoint_it_says_that_this_may_be_whole(tmp_path):
    """The same call finds the folder there, and would never end well."""
    out, state = tmp_path / "out", tmp_path / "state"
    batches, given = cases.batches("llama"), {"output_dir": out, "resume_dir": state}
    cases.prune(cases.build("llama"), batches, output_dir=out)
    with pytest.raises(FileExistsError, match=r"--overwrite\)\.$"):
        cases.prune(cases.build("llama"), batches, **given)
    with pytest.raises(FileExistsError, match=r"--overwrite\)\.$"):
        cases.prune(cases.build("llama"), batches, output_dir=out, resume_dir=out)
    state.mkdir()
    with pytest.raises(FileExistsError, match=r"killed as it ended: then the result is whole, and '.*state'"):
        cases.prune(cases.build("llama"), batches, **given)


def test_interrupted_while_the_state_is_removed_the_model_is_as_it_was(tmp_path, monkeypatch):
    model = cases.build("llama")
    before = weights_fingerprint(model)
    monkeypatch.setattr(snapshots.Snapshots, "finish", Mock(side_effect=KeyboardInterrupt))
    options = {"sparsity": 0.5, "resume_dir": tmp_path / "state"}
    with pytest.raises(KeyboardInterrupt):
        cases.prune(model, cases.batches("llama"), apply=True, **options)
    assert weights_fingerprint(model) == before


def test_a_state_that_another_run_has_saved_meanwhile_is_not_taken_for_ones_own(tmp_path, monkeypatch):
    """Both were begun before either had a state."""
    read = snapshots.Snapshots.record

    def later(self, *args, **options):
        with monkeypatch.context() as first:
            first.setattr(snapshots.Snapshots, "record", read)
            self.identity, own = {**self.identity, "config.sparsity": 0.3}, self.identity
            read(self, *args, **options)
            self.identity = own
            read(self, *args, **options)

    monkeypatch.setattr(snapshots.Snapshots, "record", later)
    with pytest.raises(ValueError, match=r"another run has saved its state in .* meanwhile"):
        run(tmp_path / "state", sparsity=0.5)


@pytest.mark.parametrize(("taken", "options"), [(".", {}), ("recovery", {"recovery_steps": 2})])
def test_two_runs_at_once_do_not_share_a_state(taken, options, tmp_path):
    """Of the same call, whose states nothing else tells apart: each would remove what the other one goes on from."""
    state = tmp_path / "state"
    working = r"another run is working in .*state.* and has not ended: wait for it"
    with alone_in(state / taken, Processes()), pytest.raises(ValueError, match=working):
        run(state, **options)
    whole = run(state, **options)
    assert not state.exists()
    assert_same(whole, run(**options))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_state_half_written_is_not_a_state(error, tmp_path):
    def full():
        raise error

    with watched("file", 40, full), pytest.raises(OSError, match="No space"):
        run(tmp_path / "state", sparsity=0.5)
    complete = list((tmp_path / "state" / "process-0").iterdir())
    assert len(complete) == 1, "and nothing of the one that did not fit"
    assert json.loads((complete[0] / "state.json").read_text())["values"]["losses"] is not None
    with going_on():
        assert_same(run(tmp_path / "state", sparsity=0.5), whole("path"))


@pytest.mark.parametrize("save_every", [0, -1, 2.5, True, "2"])
def test_save_every_is_checked(save_every):
    with pytest.raises(ValueError, match="save_every must be a whole number"):
        cases.config(save_every=save_every)


def one_of_two(folder, stop_at, kind, options):
    """Each process is killed at its own moment `stop_at`, one of them one later, unless it lost the other before."""
    model = sharded("llama", torch.float32) if options.get("shards") else None
    options = {name: value for name, value in options.items() if name != "shards"}
    at = None if stop_at is None else stop_at + torch.distributed.get_rank()
    with watched(kind, at, die) as calls:
        return run(folder, model=model, **options), len(calls)


@pytest.mark.parametrize(
    ("kind", "stop_at", "options", "left"),
    [
        pytest.param("batch", 3, {"sparsity": 0.5}, (8 - 2, 8 - 2), marks=pytest.mark.slow),
        pytest.param("batch", 4, {"sparsity": 0.5}, (8 - 2, 8 - 4), marks=pytest.mark.slow),
        pytest.param("batch", 7, {"sparsity": 0.5}, (8 - 6, 8 - 6), marks=pytest.mark.slow),
        pytest.param("batch", 4, {"sparsity": 0.5, "shards": True}, (8 - 2, 8 - 2), marks=pytest.mark.slow),
        ("block", 2, {"sparsity": 0.5, "probes": 1, "update": "admm"}, (3 - 1, 3 - 1)),
        pytest.param(
            *("block", 2, {"sparsity": 0.5, "probes": 1, "update": "admm", "shards": True}, (3 - 1, 3 - 1)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["probe 0", "between", "probe 1", "shards", "reconstruction", "reconstruction of shards"],
)
def test_two_processes_go_on_together(kind, stop_at, options, left, tmp_path):
    """`left`: how often the moment comes when they go on, in each."""
    folder = tmp_path / "state"
    wanted = together(one_of_two, None, None, kind, options)
    deaths = survivors(one_of_two, folder, stop_at, kind, options)
    assert deaths.first == -signal.SIGKILL
    assert 0 not in deaths.codes
    assert states(folder, 0)
    assert states(folder, 1)
    found = together(one_of_two, folder, None, kind, options)
    for rank in range(2):
        assert_same(found[rank][0], wanted[rank][0])
        assert found[rank][1] == left[rank] < wanted[rank][1]
    assert not folder.exists()


def test_the_largest_batch_is_not_looked_for_again(tmp_path, monkeypatch):
    """Free memory is another now: the run that goes on has the batches that it began with."""
    first = batch_size.LARGEST_BATCH
    monkeypatch.setattr(batch_size, "LARGEST_BATCH", 4)
    interrupted(tmp_path / "state", sparsity=0.5, batch_size="auto")
    monkeypatch.setattr(measured_passes, "measured_pass", lambda *_: pytest.fail("looked for"))
    unfinished = tmp_path / "state" / "process-0" / "probe-0-8.partial"
    unfinished.mkdir()
    (unfinished / "state.json").write_text('{"identity": {"rows')  # killed while it was written
    with going_on():
        found = run(tmp_path / "state", sparsity=0.5, batch_size="auto")
    monkeypatch.setattr(batch_size, "LARGEST_BATCH", first)
    wanted = run(sparsity=0.5, parts=cases.batches("llama", rows=BATCHES, batch_size=4))
    assert all(torch.equal(found["masks"][name], mask) for name, mask in wanted["masks"].items())


def test_batches_of_unlike_sizes_stay_so_where_none_is_looked_for(tmp_path):
    options = {"sparsity": 0.5, "update": "sparsegpt", "batch_size": "auto"}
    parts = [one for seed, rows in ((1, 2), (2, 8), (3, 2)) for one in cases.batches("llama", rows, 12, rows, seed)]
    wanted = run(parts=parts, **options)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched("block", 2, interrupt):
        run(tmp_path / "state", parts=parts, **options)
    with going_on():
        assert_same(run(tmp_path / "state", parts=parts, **options), wanted)


def test_a_search_on_another_text_is_another_run(tmp_path):
    def search(evaluation):
        return prune_pretrained(
            cases.build("llama"),
            cases.config(sparsity=0.5, max_metric_drop=1e9, sparsity_step=0.25, save_every=1),
            calibration=cases.batches("llama", rows=4, batch_size=1),
            evaluation=evaluation,
            apply=False,
            resume_dir=tmp_path / "state",
            progress=False,
        )

    with pytest.raises(RuntimeError, match="on purpose"), patch("gradprobe_hf.probe.engine.summed_loss", failing_at(9)):
        search(cases.batches("llama", seed=3))
    with pytest.raises(ValueError, match="its evaluation was"):
        search(cases.batches("llama", seed=4))


def test_what_has_nothing_to_resume_refuses_the_folder(tmp_path):
    with pytest.raises(ValueError, match=r"resume_dir=.* has no effect here"):
        run(tmp_path / "state", score="magnitude")
    assert not (tmp_path / "state").exists()


def test_folders_of_the_user_s_own_stay(tmp_path):
    for name in ("process-notes", "process-2024"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    (tmp_path / "process-7" / "probe-0-4").mkdir(parents=True)  # of a run with more processes
    run(tmp_path, sparsity=0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"process-notes", "process-2024"}


def test_where_no_state_can_be_kept_is_told_before_any_text_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.pruning.load_inputs", lambda *_: pytest.fail("something was loaded"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises((OSError, ValueError), match=r"resume_dir"):
        run(tmp_path / "file" / "state", sparsity=0.5)
