"""A recovery that was killed goes on where it was, and one with no room for its state says so first."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import Trainer

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.model.parameters import parameter_bytes
from gradprobe_hf.recovery import resuming
from gradprobe_hf.recovery.distil import distil
from gradprobe_hf.recovery.resuming import check_own
from gradprobe_hf.recovery.teacher import LiveTeacher
from gradprobe_hf.recovery.trainer import BestState
from tests import cases
from tests.distillation import DENSE, KilledError, place, text, trained
from tests.grids import grid
from tests.trainers import half_pruned, weights


@grid(
    "options, name",
    {"plain": {}, "adapters": {"lora_r": 2}, "from disk": {"teacher_top_k": 20}},
    ["mixtral", DENSE],  # in files the experts of a mixture go by other names
)
def test_a_run_that_was_killed_ends_with_the_same_weights(tmp_path, monkeypatch, name, options):
    if name == "mixtral" and "lora_r" in options:
        pytest.skip("its experts are no linear layers, which adapters are beside")
    dense = cases.build(name)
    student, _ = half_pruned(name)
    first, second = copy.deepcopy(student), copy.deepcopy(student)
    options = {"steps": 6, "eval_steps": 2, "save_steps": 2, **options}
    whole = trained(student, dense, folder=tmp_path / "whole", **options)
    save = Trainer._save_checkpoint

    def killed(self, *args):
        if self.state.global_step == 4:
            Path(self.args.output_dir, "checkpoint-4").mkdir()  # half of it is there
            raise KilledError
        return save(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save_checkpoint", killed)
        with pytest.raises(KilledError):
            trained(first, dense, folder=tmp_path / "run", **options)
    resumed = trained(second, dense, folder=tmp_path / "run", **options)
    assert (resumed.held_out, resumed.best_step) == (whole.held_out, whole.best_step)
    assert all(torch.equal(value, weights(student)[name]) for name, value in weights(second).items())
    assert not (tmp_path / "run").exists()


def test_one_killed_while_it_writes_its_best_state_goes_on(tmp_path, monkeypatch):
    """safetensors writes a file of another name and renames it: a kill leaves that, as large as the model."""
    dense, folder, measured = cases.build(DENSE), tmp_path / "run", []
    student, _ = half_pruned()
    first, second = copy.deepcopy(student), copy.deepcopy(student)
    options = {"steps": 6, "eval_steps": 2, "save_steps": 2}
    whole = trained(student, dense, folder=tmp_path / "whole", **options)

    def killed(values, path):
        measured.append(path)
        if len(measured) == 3:
            path.with_name(".tmpH5DjUv").write_bytes(b"half of it")
            raise KilledError
        save_file(values, path)

    with monkeypatch.context() as patched:
        patched.setattr("gradprobe_hf.recovery.trainer.save_file", killed)
        with pytest.raises(KilledError):
            trained(first, dense, folder=folder, **options)
    check_own(folder, None)
    with monkeypatch.context() as patched:
        patched.setattr(
            Trainer, "train", lambda *_, **__: pytest.fail("left" if list(folder.glob(".tmp*")) else "gone")
        )
        with pytest.raises(pytest.fail.Exception, match="gone"):
            trained(copy.deepcopy(second), dense, folder=folder, **options)
    assert trained(second, dense, folder=folder, **options).held_out == whole.held_out
    assert all(torch.equal(value, weights(student)[name]) for name, value in weights(second).items())
    (folder / "of").mkdir(parents=True)
    (folder / "of" / ".tmpH5DjUv").write_bytes(b"somebody else")
    with pytest.raises(ValueError, match=r"holds \.tmpH5DjUv, which no recovery wrote"):
        check_own(folder / "of", None)


def test_one_killed_while_it_writes_what_it_is_of_begins_anew(tmp_path, monkeypatch):
    dense, (student, _), folder = cases.build(DENSE), half_pruned(), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", Mock(side_effect=KilledError))
        with pytest.raises(KilledError):
            trained(copy.deepcopy(student), dense, folder=folder, steps=2)
    assert [path.name for path in folder.glob("recovery*")] == ["recovery.json.partial"]
    (folder / "recovery.json.partial").write_text('{"steps')
    check_own(folder, None)
    assert trained(student, dense, folder=folder, steps=2).steps == 2


@pytest.mark.parametrize("removed", range(3))
def test_one_killed_while_its_state_is_removed_goes_on_or_begins_anew(removed, tmp_path, monkeypatch):
    dense, (student, _), folder = cases.build(DENSE), half_pruned(), tmp_path / "run"
    options = {"steps": 4, "eval_steps": 2, "save_steps": 2}
    whole = trained(copy.deepcopy(student), dense, folder=tmp_path / "whole", **options)
    real, calls = resuming.shutil.rmtree, []

    def fatal(path, **how):
        if len(calls) == removed:
            raise KilledError
        calls.append(path)
        real(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(resuming.shutil, "rmtree", fatal)
        with pytest.raises(KilledError):
            trained(copy.deepcopy(student), dense, folder=folder, **options)
    check_own(folder, None)
    again = trained(student, dense, folder=folder, **options)
    assert (again.held_out, again.best_step) == (whole.held_out, whole.best_step)


def test_interrupted_while_its_state_is_removed_the_model_is_as_it_was(tmp_path, monkeypatch):
    dense, (student, _) = cases.build(DENSE), half_pruned()
    before = cases.bits(student)
    config = RecoveryConfig(steps=2, batch_size=2, learning_rate=5e-3)
    monkeypatch.setattr("gradprobe_hf.recovery.distil.remove_state", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        recover_pretrained(
            *(student, dense, config),
            text=cases.batches(DENSE, rows=8),
            evaluation=False,
            resume_dir=tmp_path / "state",
            output_dir=tmp_path / "out",
            progress=False,
        )
    assert not cases.changed(student, before)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_checkpoint_whose_state_was_cut_off_is_no_whole_one(tmp_path):
    for step, state in ((2, "{}"), (4, '{"global'), (6, "")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert resuming._begun(tmp_path, {}) == tmp_path / "checkpoint-2"
    for name in (".seen-abc", ".gradprobe-abc"):  # of a process that was killed while it looked whether it may write
        (tmp_path / name).touch()
    check_own(tmp_path, None)


def test_a_checkpoint_that_lacks_parameters_is_not_gone_on_from(tmp_path, monkeypatch):
    dense, (student, _) = cases.build(DENSE), half_pruned()
    options = {"steps": 6, "eval_steps": 2, "save_steps": 2}

    def killed(*_, **__):
        (written,) = tmp_path.glob("checkpoint-2/model.safetensors")
        values = load_file(written)
        values.pop("model.layers.0.mlp.up_proj.weight")
        save_file(values, written, metadata={"format": "pt"})
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr("transformers.trainer.rotate_checkpoints", killed)
        with pytest.raises(KilledError):
            trained(copy.deepcopy(student), dense, folder=tmp_path, **options)
    with pytest.raises(ValueError, match=r"of other parameters than the model's \(model.layers.0.mlp.up_proj.weight"):
        trained(student, dense, folder=tmp_path, **options)


@pytest.mark.parametrize("save_steps", [1, 9])
def test_a_run_that_was_killed_behind_its_last_step_takes_no_more(save_steps, tmp_path, monkeypatch):
    dense = cases.build(DENSE)
    student, _ = half_pruned()
    first, second = copy.deepcopy(student), copy.deepcopy(student)
    options = {"steps": 9, "learning_rate": 0.05, "eval_steps": 1, "early_stopping_patience": 2}
    options |= {"save_steps": save_steps}
    whole = trained(student, dense, folder=tmp_path / "whole", **options)
    assert whole.steps < 9, "it stops early"
    with monkeypatch.context() as patched:
        patched.setattr(BestState, "load", None)
        with pytest.raises(TypeError):
            trained(first, dense, folder=tmp_path / "run", **options)
    monkeypatch.setattr(Trainer, "training_step", None)
    resumed = trained(second, dense, folder=tmp_path / "run", **options)
    assert (resumed.steps, resumed.held_out) == (whole.steps, whole.held_out)
    assert all(torch.equal(value, weights(student)[name]) for name, value in weights(second).items())


@pytest.mark.parametrize("lora_r", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_seconds_are_those_of_all_calls(lora_r, tmp_path, monkeypatch):
    dense, folder, rows, save = cases.build(DENSE), tmp_path / "run", text(), Trainer._save_checkpoint
    config = RecoveryConfig(steps=2, batch_size=2, save_steps=1, lora_r=lora_r)

    def killed(self, *args):
        save(self, *args)
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save_checkpoint", killed)
        with pytest.raises(KilledError), place(folder) as here:
            distil(half_pruned()[0], LiveTeacher(dense), rows, config, here)
    path = folder / "checkpoint-1" / "seconds.json"
    assert 0 < json.loads(path.read_text())["recovery"] < 100
    path.write_text(json.dumps({"load": 7.0, "recovery": 100.0}))
    with place(folder) as here:
        found = distil(half_pruned()[0], LiveTeacher(dense), rows, config, here)
        assert here.stopwatch.seconds == {"load": 7.0, "recovery": found.seconds}
    assert 100 < found.seconds < 200


def test_a_folder_with_other_files_is_refused_and_they_stay(tmp_path):
    folder, model = tmp_path / "recovery", cases.build(DENSE)
    (folder / "checkpoint-7").mkdir(parents=True)  # of a Trainer of the user's own
    with pytest.raises(ValueError, match=r"holds checkpoint-7, which no recovery wrote"):
        recover_pretrained(model, model, resume_dir=folder, progress=False)
    (folder / "notes.txt").write_text("mine")
    config = GradProbeConfig(recovery_steps=1)
    with pytest.raises(ValueError, match=r"holds checkpoint-7, notes.txt, which no recovery wrote"):
        prune_pretrained(model, config, resume_dir=tmp_path, progress=False)
    assert (folder / "notes.txt").read_text() == "mine"
    state = tmp_path / "state"
    for out, said in ((state, "is, or is in"), (state / "out", "is removed when the recovery is done")):
        with pytest.raises(ValueError, match=said):
            recover_pretrained(model, model, resume_dir=state, output_dir=out, progress=False)
    with pytest.raises(ValueError, match="is, or is in"):
        prune_pretrained(model, config, resume_dir=state / "in", output_dir=state, progress=False)
    with pytest.raises(ValueError, match=r"^offload_folder=.* is, or is in, .*\(--offload-folder\)"):
        recover_pretrained(model, "dense", offload_folder=state / "in", output_dir=state, progress=False)


@pytest.mark.parametrize("free", [0, 1], ids=["a byte short", "enough"])
def test_a_state_that_is_kept_until_the_checkpoint_is_written_wants_room_for_both(free, tmp_path, monkeypatch):
    student, dense = half_pruned()[0], cases.build(DENSE)
    needed = (4 + 12) * dense.num_parameters() + parameter_bytes(dense)
    usage = shutil.disk_usage(tmp_path)._replace(free=needed - 1 + free)
    monkeypatch.setattr("gradprobe_hf.recovery.resuming.shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr("gradprobe_hf.recovery.recover.evaluation_of", lambda *_: 1 / 0)
    told = pytest.raises(ZeroDivisionError) if free else pytest.raises(OSError, match="and the checkpoint need about")
    with told:
        recover_pretrained(
            student,
            dense,
            RecoveryConfig(steps=1),
            processing_class=cases.tokenizer(),
            resume_dir=tmp_path / "state",
            output_dir=tmp_path / "out",
            progress=False,
        )


@pytest.mark.parametrize("resumes", [False, True], ids=["temporary", "resume_dir"])
def test_a_disk_without_room_for_the_state_is_told_before_the_work(resumes, text_file, tmp_path, monkeypatch):
    state, dense, (student, _) = (tmp_path / "state") if resumes else None, cases.build(DENSE), half_pruned()
    # A best state beside one that is better, or one checkpoint, that of the one step.
    needed = (4 + 12 if resumes else 2 * 4) * dense.num_parameters()
    usage = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
    monkeypatch.setattr("gradprobe_hf.recovery.resuming.shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr("gradprobe_hf.recovery.recover.evaluation_of", lambda *_: 1 / 0)
    remedy = r"resume_dir \(--resume-dir\)" if resumes else "TMPDIR"
    options = {"resume_dir": state, "processing_class": cases.tokenizer(), "progress": False}
    with pytest.raises(OSError, match=f"state of the training needs about .* are free: .*{remedy}"):
        recover_pretrained(student, dense, RecoveryConfig(steps=1), **options)
    with pytest.raises(ZeroDivisionError):  # adapters are small
        recover_pretrained(student, dense, RecoveryConfig(steps=1, lora_r=1), **options)
    config = GradProbeConfig(recovery_steps=1, num_samples=4, sequence_length=16)
    with pytest.raises(OSError, match=remedy):
        prune_pretrained(dense, config, calibration=str(text_file), evaluation=False, **options)


@pytest.mark.parametrize("error", [SafetensorError("No space left"), RuntimeError("inline_container.cc:8] failed")])
def test_a_disk_that_becomes_full_is_an_os_error(error, monkeypatch):
    def full(*_):
        raise error

    monkeypatch.setattr("gradprobe_hf.recovery.trainer.save_file", full)
    with pytest.raises(OSError, match=r"cannot be written in .*TMPDIR"):
        trained(half_pruned()[0], cases.build(DENSE))


def test_a_folder_of_another_run_is_refused(tmp_path, monkeypatch):
    dense = cases.build(DENSE)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save_checkpoint", None)
        with pytest.raises(TypeError):
            trained(half_pruned()[0], dense, folder=tmp_path / "run", steps=2, save_steps=1)
    with pytest.raises(ValueError, match=r"state of another run: steps, weights differ \(2 there, 4 here\)"):
        trained(half_pruned(seed=1)[0], dense, folder=tmp_path / "run", save_steps=1)
    with pytest.raises(ValueError, match=r"state of another run: teacher differ\. Go on"):
        trained(half_pruned()[0], cases.build(DENSE, seed=3), folder=tmp_path / "run", steps=2)


def test_another_run_is_refused_before_its_work_and_leaves_the_first_ones_state(text_file, tmp_path, monkeypatch):
    """What it is of is compared as soon as it is known: options before a model is loaded, text before it is taught."""
    state, (student, _), dense = tmp_path / "state", half_pruned(), cases.build(DENSE)
    config = RecoveryConfig(
        steps=2, batch_size=2, sequence_length=16, num_samples=8, evaluation_samples=2, save_steps=1, teacher_top_k=4
    )

    def trained_on(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_input_embeddings().weight *= 1.01
        return other

    def run(config=config, pruned=student, teacher=dense, text="self"):
        options = {"text": text, "processing_class": cases.tokenizer(), "progress": False}
        recover_pretrained(pruned, teacher, config, resume_dir=state, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save_checkpoint", None)
        with pytest.raises(TypeError):
            run()
    kept = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    monkeypatch.setattr("gradprobe_hf.recovery.recover.measure_both", lambda *_: pytest.fail("work was done"))
    for change, said in (
        ({"config": replace(config, seed=7, steps=3)}, r"steps, seed differ \(2 there, 3 here\)"),
        ({"pruned": trained_on(student)}, "weights differ"),
        ({"teacher": trained_on(dense)}, "teacher differ"),
        ({"text": str(text_file)}, "text differ"),
    ):
        with pytest.raises(ValueError, match=f"state of another run: {said}"):
            run(**change)
        assert kept == {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="steps differ"):
        run(replace(config, steps=3), "me/pruned", "me/dense")
    with pytest.raises(pytest.fail.Exception, match="work was done"):
        run()
