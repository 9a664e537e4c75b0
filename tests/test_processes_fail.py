"""What fails in one of several processes: the others are told at once, and go on with what comes next."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from gradprobe_hf import RecoveryConfig, recover_pretrained
from gradprobe_hf.evaluation import task_metric
from gradprobe_hf.model.files import offload_store, saving
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.snapshots import Snapshots
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


def failing_to_save(options, folder):
    """Two models by one script; the state of the first cannot be written by one process after its second time."""
    ended, other, real = [], torch.distributed.get_rank() == 1, Snapshots._write
    for number in range(2):
        calls = []

        def write(*arguments, fails=other and number == 0, calls=calls):
            calls.append(1)
            if fails and len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Snapshots, "_write", write)
            try:
                data = cases.batches("llama", rows=4, batch_size=1)
                found = cases.prune(cases.build("llama"), data, resume_dir=f"{folder}/{number}", **options)
                ended.append(found.report.zeros)
            except OSError as error:
                ended.append(f"{type(error).__name__}: {error}")
    return ended


@pytest.mark.parametrize(
    "options",
    [{"structure": {"blocks": 1, "ffn": 8}}, {"sparsity": 0.5, "update": "admm"}, {"score": "wanda", "update": "obs"}],
)
def test_a_state_that_one_process_cannot_write_fails_in_all(options, tmp_path):
    first, second = together(failing_to_save, options, str(tmp_path))
    assert first == second
    assert "No space left" in first[0]
    assert first[1] > 0


def changed_on_disk(folder, free):
    """Of an offloaded model: what it ends with, and whether its weights have changed.

    Args:
        free: bytes on the disk, for all that is known; None: enough, and the process that is not the main one finds out
            otherwise.
    """
    rank, real = torch.distributed.get_rank(), offload_store.save_file
    written = []

    def save(tensors, path):
        written.append(sum(tensor.nbytes for tensor in tensors.values()))
        if free is None and rank == 1 and len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload_store, "save_file", save)
        if free is not None:
            usage = shutil.disk_usage(folder)
            patched.setattr(offload_store.shutil, "disk_usage", lambda _: usage._replace(free=free))
        where = {"device_map": {"": "disk"}, "offload_folder": f"{folder}/off"}
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", **where)
        before = {target.name: target.matrix(model).clone() for target in find_targets(model)}
        try:
            cases.prune(model, cases.batches("llama", rows=4, batch_size=1), score="magnitude", apply=True)
            ended = "nothing"
        except OSError as error:
            ended = str(error)
    after = {target.name: target.matrix(model) for target in find_targets(model)}
    return ended, any(not torch.equal(after[name], values) for name, values in before.items()), len(written)


def test_a_store_that_one_process_cannot_write_is_changed_in_none(tmp_path):
    cases.build("llama").save_pretrained(tmp_path / "model")
    first, second = together(changed_on_disk, str(tmp_path), None)
    assert "No space left" in first[0]
    assert first[0] == second[0]
    assert not first[1]
    assert not second[1]
    assert first[2] > 0, "it had been written"


def test_each_process_has_a_store_and_all_have_to_fit(tmp_path):
    model = cases.build("llama")
    model.save_pretrained(tmp_path / "model")
    one = sum(target.numel for target in find_targets(model)) * 4
    for ended, changed, written in together(changed_on_disk, str(tmp_path), 3 * one // 2):
        assert "choose another offload_folder" in ended
        assert not changed
        assert written == 0
    for ended, changed, _ in together(changed_on_disk, str(tmp_path), 2 * one):
        assert ended == "nothing"
        assert changed


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
