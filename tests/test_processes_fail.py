"""What fails in one of several processes: the others are told at once, and go on with what comes next."""

from __future__ import annotations

import errno
import os
import signal
from unittest.mock import Mock

import pytest
import torch

from gradprobe_hf import RecoveryConfig, recover_pretrained
from gradprobe_hf.evaluation import task_metric
from gradprobe_hf.model.files import saving
from gradprobe_hf.model.passes.loss import summed_loss
from tests import cases
from tests.launch import survivors, together
from tests.test_fsdp import sharded
from tests.test_reach import llava


def one_never_comes():
    if torch.distributed.get_rank() == 1:
        os._exit(3)
    signal.alarm(60)  # what waited did so for a week, and only a signal that nothing handles ends that
    with pytest.raises(ConnectionError, match="lost the others"):
        cases.prune(cases.build("llama"), cases.batches("llama"))
    os._exit(5)


def test_a_process_that_never_comes_is_not_waited_for():
    assert survivors(one_never_comes).codes == [5, 3]


def swept(fails):
    """Two models by one script, which goes on where one of them cannot be pruned. Args: fails: how the first does."""
    ended = []
    for number in range(2):
        calls = []

        def loss_fn(model, batch, number=number, calls=calls):
            calls.append(1)
            if number == 0 and torch.distributed.get_rank() == 1 and len(calls) == fails[1]:
                if fails[0] == "raises":
                    raise LookupError("a bad batch")
                return summed_loss(model, batch)[0] * float("nan")
            return summed_loss(model, batch)[0]

        try:
            result = cases.prune(cases.build("llama"), cases.batches("llama", rows=6, batch_size=1), loss_fn=loss_fn)
            ended.append(result.report.zeros)
        except (LookupError, ValueError) as error:
            ended.append(f"{type(error).__name__}: {error}"[:60])
    return ended


@pytest.mark.parametrize(
    ("fails", "said"),
    [(("raises", 2), "LookupError: a bad batch"), (("is NaN", 1), "ValueError: the calibration loss is nan")],
)
def test_a_batch_that_fails_in_one_process_fails_in_all(fails, said):
    first, second = together(swept, fails)
    assert first == second
    assert first[0].startswith(said)
    assert first[1] == cases.prune(cases.build("llama"), cases.batches("llama", rows=6)).report.zeros


def failing_outside_of_probes(where, folder):
    """Two models by one script, the first of which one process alone cannot load, judge or score."""
    ended, other = [], torch.distributed.get_rank() == 1
    for number in range(2):
        fails = other and number == 0

        def metric_fn(model, fails=fails):
            if fails and where == "its metric":
                raise LookupError("a bad row")
            return 1.0

        options = {"metric_fn": metric_fn, "max_metric_drop": 0.5} if where == "its metric" else {}
        model = f"{folder}/gone" if fails and where == "loading" else cases.build("llama")
        data = cases.batches("llama", rows=6, batch_size=1)
        if where == "the task's metric":
            model, data = cases.build("vit"), cases.batches("vit")
            options = {"metric": "accuracy", "evaluation": data}
            data = cases.batches("vit", seed=5)
        with pytest.MonkeyPatch.context() as patched:
            if fails and where == "the task's metric":
                patched.setattr(task_metric, "send_to_device", Mock(side_effect=LookupError("a bad row")))
            try:
                ended.append(cases.prune(model, data, sparsity=0.5, **options).report.zeros)
            except (LookupError, OSError) as error:
                ended.append(f"{type(error).__name__}: {error}")
    return ended


@pytest.mark.parametrize("where", ["loading", "its metric", "the task's metric"])
def test_what_fails_in_one_process_outside_of_probes_fails_in_all(where, tmp_path):
    first, second = together(failing_outside_of_probes, where, str(tmp_path))
    assert first == second
    assert first[0].startswith("FileNotFoundError: " if where == "loading" else "LookupError: a bad row")
    assert first[1] > 0


def begun_alone(folder):
    """The state of a run of one process that was stopped in its probe."""
    calls = []

    def stops(model, batch):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return summed_loss(model, batch)[0]

    with pytest.raises(KeyboardInterrupt):
        cases.prune(
            cases.build("llama"),
            cases.batches("llama", rows=6, batch_size=1),
            loss_fn=stops,
            resume_dir=folder,
            save_every=1,
        )


def resumed(folder):
    with pytest.raises(ValueError, match="its number of processes was 1, now it is 2"):
        cases.prune(cases.build("llama"), cases.batches("llama", rows=6, batch_size=1), resume_dir=folder, save_every=1)
    return True


def test_a_state_that_only_one_process_has_is_refused_in_all(tmp_path):
    begun_alone(tmp_path / "state")
    assert together(resumed, tmp_path / "state") == [True, True]


def test_states_of_more_processes_go_with_the_run(tmp_path):
    """Those of the others were lost, so that nothing of the run is left but what nobody would remove."""
    left = tmp_path / "state" / "process-1" / "probe-0-4"
    left.mkdir(parents=True)
    (left / "state.json").write_text("old")
    cases.prune(cases.build("llama"), cases.batches("llama"), resume_dir=tmp_path / "state")
    assert not (tmp_path / "state").exists()


def full_disk(folder):
    """A sharded model, whose second file the main process cannot write: the others are giving it their shards."""
    result = cases.prune(sharded("llama", torch.float32), cases.batches("llama", batch_size=1), apply=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "SMALLEST_SHARD", 2000)
        real, calls = saving.save_file, []

        def save_file(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        patched.setattr(saving, "save_file", save_file)
        if torch.distributed.get_rank() == 0:
            with pytest.raises(OSError, match="the disk is full"):
                result.save_pretrained(folder / "full")
        else:
            result.save_pretrained(folder / "full")
    with pytest.raises(FileExistsError, match="there"):
        result.save_pretrained(folder / "there")
    result.save_pretrained(folder / "fine")
    return True


def test_shards_that_cannot_be_written_leave_nobody_waiting(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    assert together(full_disk, tmp_path) == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fine", "there"]
    assert (tmp_path / "fine" / "model.safetensors").is_file()


def half_zero(build):
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.masked_fill_(parameter.abs() < parameter.abs().median(), 0)
    return model


def recovered(**options):
    """A vision-language model on text alone, of which its tower has no part in the loss."""
    torch.manual_seed(0)
    teacher = llava().eval()
    rows = [{"input_ids": batch["input_ids"] % 200} for batch in cases.batches("llama", rows=24, batch_size=1)]
    config = RecoveryConfig(steps=2, batch_size=4, sequence_length=16, **options)
    result = recover_pretrained(half_zero(llava), teacher, config, text=rows, evaluation=False, progress=False)
    return result.report.recovery["steps"]


def test_a_part_without_gradients_is_no_error_where_blocks_are_recomputed():
    assert together(recovered_recomputed) == [2, 2]


def recovered_recomputed():
    return recovered(gradient_checkpointing=True)


def on_disks_of_their_own(folder):
    """As on two machines."""
    model, teacher = half_zero(lambda: cases.build("llama")), cases.build("llama")
    own = folder / str(torch.distributed.get_rank())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gradprobe_hf.recovery.distil._SEEN_AFTER", 0.2)
        with pytest.raises(ValueError, match=r"does not see the main one's folder.*resume_dir"):
            recover_pretrained(
                model,
                teacher,
                RecoveryConfig(steps=2, batch_size=4, sequence_length=16),
                text=cases.batches("llama", rows=24, batch_size=1),
                evaluation=False,
                resume_dir=own,
                progress=False,
            )
    return True


def test_a_folder_that_only_one_machine_sees_is_told_before_training(tmp_path):
    assert together(on_disks_of_their_own, tmp_path) == [True, True]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "no mark is left"
