"""Two real processes over gloo share the work of one, and end with what it would have ended with."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import gradprobe_hf.runtime.processes as processes
from gradprobe_hf import prune_pretrained
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.data.batches import Batches, from_iterable, row_count
from gradprobe_hf.data.text.self_generated import KeptText
from gradprobe_hf.memory import measured_passes
from gradprobe_hf.memory.memory_plan import plan_memory
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.steps import own_steps
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.recovery import teacher
from gradprobe_hf.recovery.distil import teacher_of, workplace
from gradprobe_hf.recovery.text import RecoveryText
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.shapes.search import rows_apart
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.updates.least_squares import solve_least_squares
from gradprobe_hf.updates.table import UPDATES
from tests import cases
from tests.grids import grid, some
from tests.launch import TeamError, files_of, in_child, survivors, together


def parts_of(name, dtype, rows=6, batch_size=1):
    parts = cases.batches(name, rows=rows, batch_size=batch_size)
    return [{k: v.to(dtype) if v.is_floating_point() else v for k, v in part.items()} for part in parts]


def pruned(name, dtype, rows, options, output=None, folder=None):
    """What one process gets: masks, losses, zeros, and how many collectives it took."""
    model = cases.build(name, dtype)
    result = prune_pretrained(
        model,
        cases.config(**options),
        calibration=parts_of(name, dtype, rows),
        evaluation=parts_of(name, dtype, rows=4),
        output_dir=output,
        resume_dir=folder,
        progress=False,
    )
    return {
        "masks": {key: mask.clone() for key, mask in result.masks.items()},
        "probes": result.report.probes,
        "evaluation": result.report.evaluation,
        "zeros": result.report.zeros,
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "collectives": result.processes.collectives,
        "main": result.processes.is_main,
    }


CONFIGURATIONS = {
    "path": {"sparsity": 0.5},
    "sequence, int8": {"sparsity": 0.4, "fisher": "sequence", "accumulator_dtype": "int8"},
    "token by block": {"sparsity": 0.3, "fisher": "token", "scope": "block"},
    "threshold": {"sparsity": 0.6, "rule": "threshold", "gradient_threshold": 0.3},
    "wanda": {"score": "wanda", "sparsity": 0.45},
    "2:4": {"pattern": "2:4"},
    "obs": {"update": "obs"},
    "admm": {"update": "admm"},
    "sparsegpt": {"update": "sparsegpt"},
    "rounds": {"rounds": (0.3, 0.5)},
    "iterate": {"max_metric_drop": 0.0, "sparsity_step": 0.2},
    "sequential": {"order": "sequential"},
    "bounds": {"max_matrix_sparsity": 0.55},
    "structures": {"structure": {"ffn": 8, "kv_groups": 1, "blocks": 1}},
    "structures by gates": {"structure": {"ffn": 8}, "importance": "fisher", "update": "none"},
    "structures by both": {"structure": {"ffn": 8, "kv_groups": 1}, "importance": "obs+fisher", "update": "none"},
    "structures for a budget": {"structure": "auto", "params": 0.9},
}

# Rounding may turn which weight goes in a round of ADMM, and conjugate gradients end a step earlier or later.
CLOSE = {"sequence, int8": 0.02, "obs": 1e-9, "admm": 1e-6, "sparsegpt": 1e-9}
CLOSE |= {"structures": 1e-6, "structures for a budget": 1e-6}


@some("kind", CONFIGURATIONS, fast=("sequence, int8", "2:4", "admm", "structures"))
def test_two_processes_end_with_the_masks_of_one(kind):
    options = CONFIGURATIONS[kind]
    alone = pruned("llama", torch.float64, 4, options)
    for one in together(pruned, "llama", torch.float64, 4, options):
        assert one["zeros"] == alone["zeros"]
        for key, mask in alone["masks"].items():
            if kind != "sequence, int8":  # the rounding of reduced accumulators differs
                assert torch.equal(one["masks"][key], mask), key
        close = CLOSE.get(kind, 1e-12)
        assert one["probes"] == pytest.approx(alone["probes"], rel=close)
        for state in ("dense", "pruned"):
            wanted = alone["evaluation"][state]["loss"]
            assert one["evaluation"][state]["loss"] == pytest.approx(wanted, rel=close)
        if close <= 1e-9:
            assert_close_divergence(one["evaluation"]["divergence"], alone["evaluation"]["divergence"])


def assert_close_divergence(found, wanted):
    """Over the windows of all processes, in their order: the interval is drawn from them."""
    assert found["top1_agreement"] == wanted["top1_agreement"]
    for name in ("kl", "perplexity_ratio", "perplexity_ratio_interval"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-7), name


def reconstructed(name, dtype, rows, options):
    result = prune_pretrained(
        cases.build(name, dtype),
        cases.config(score="magnitude", **options),
        calibration=parts_of(name, dtype, rows),
        evaluation=False,
        apply=False,
        progress=False,
    )
    return {key: result.new_weights[key].clone() for key in result.new_weights}


@pytest.mark.parametrize(
    ("name", "dtype", "close", "kind"),
    [
        ("llama", torch.float64, 1e-8, "update"),
        ("t5", torch.float64, 1e-8, "update"),
        ("mixtral", torch.float32, 1e-3, "update"),
        ("gpt2", torch.float64, 1e-6, "refinement"),
    ],
)
def test_two_processes_reconstruct_the_weights_of_one(name, dtype, close, kind):
    """Two batches and one; experts that one process sends nothing to, and blocks of two stacks."""
    options = {"update": "obs"} if kind == "update" else {"refinement": "blocks"}
    alone = reconstructed(name, dtype, 3, options)
    assert kind == "update" or len(alone) > len(find_targets(cases.build(name))), "gains and biases are trained"
    for one in together(reconstructed, name, dtype, 3, options):
        for key, values in alone.items():
            torch.testing.assert_close(one[key], values, rtol=close, atol=close)


def updated_here(rows):
    """The matrices that this process has found new weights for, and those of all processes."""
    solved = []

    def solve(problem, mask):
        found = solve_least_squares(problem, mask)
        solved.append(found.values)
        return found

    row = dataclasses.replace(UPDATES["least_squares"], function=solve)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(UPDATES, "least_squares", row)
        result = prune_pretrained(
            cases.build("llama", torch.float64),
            cases.config(score="magnitude", update="least_squares"),
            calibration=parts_of("llama", torch.float64, rows),
            evaluation=False,
            apply=False,
            progress=False,
        )
    return solved, {key: values.clone() for key, values in result.new_weights.items()}


def test_every_matrix_is_updated_in_one_process_and_known_in_all():
    (first, known), (second, also_known) = together(updated_here, 2)
    assert all(torch.equal(values, also_known[key]) for key, values in known.items())
    assert len(first) + len(second) == len(known)
    assert min(len(first), len(second)) >= len(known) // 4
    for values in first + second:
        assert any(values.shape == one.shape and torch.equal(values, one) for one in known.values())


def full_disk_of_one(owner, name, work):
    """What `work` raises where the disk of the second process is full when `owner.name` writes to it."""
    with pytest.MonkeyPatch.context() as patch:
        if not join_processes().is_main:

            def write(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(owner, name, write)
        with pytest.raises(OSError, match="No space left") as raised:
            work()
    return raised.value.errno


def weights_on_a_full_disk():
    run = partial(pruned, "llama", torch.float32, 4, {"score": "magnitude", "update": "least_squares"})
    return full_disk_of_one(NewWeights, "add", run)


def predictions_on_a_full_disk(folder):
    model, rows = cases.build("llama"), RecoveryText.of(from_iterable(parts_of("llama", torch.float32), "text"), 1)
    config = RecoveryConfig(teacher_top_k=3, batch_size=1)
    with workplace(Path(folder), join_processes(), Stopwatch(), False) as place:
        return full_disk_of_one(teacher, "_write", partial(teacher_of, model, rows, config, place))


def test_a_disk_that_is_full_in_one_process_is_an_error_in_all(tmp_path):
    """The others would wait for it in their next collective."""
    assert together(weights_on_a_full_disk) == [errno.ENOSPC] * 2
    assert together(predictions_on_a_full_disk, str(tmp_path / "teacher")) == [errno.ENOSPC] * 2


@grid("name, rows", ["llama", "mixtral"], {"uneven": 5, "one each": 2})
def test_float32_masks_overlap_and_are_the_same_everywhere(name, rows):
    alone = pruned(name, torch.float32, rows, {"sparsity": 0.5})
    first, second = together(pruned, name, torch.float32, rows, {"sparsity": 0.5})
    assert first["zeros"] == second["zeros"] == alone["zeros"]
    same = total = 0
    for key, mask in alone["masks"].items():
        assert torch.equal(first["masks"][key], second["masks"][key])
        same += int((first["masks"][key] == mask).sum())
        total += mask.numel()
    assert same / total >= 0.9999
    assert (first["main"], second["main"]) == (True, False)


@grid("accumulators, name", ["int8", "bfloat16"], ["mixtral", "llama"])
def test_sums_that_are_rounded_are_the_same_everywhere(name, accumulators):
    """Though processes have made different numbers of updates: batches do not divide, and experts see what they see."""
    options = {"sparsity": 0.5, "accumulator_dtype": accumulators}
    first, second = together(pruned, name, torch.float32, 5, options)
    assert all(torch.equal(mask, second["masks"][key]) for key, mask in first["masks"].items())


def test_what_is_on_the_cpu_goes_where_the_group_can_talk(monkeypatch):
    """nccl has nothing for the CPU: a tensor that is there is sent from the accelerator, and the sum comes back."""
    tensor = torch.tensor([1.0])
    monkeypatch.setattr(processes.dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(processes.torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(processes.torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert processes._on_backend_device(tensor).device.type == "meta"
    monkeypatch.setattr(processes.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert processes._on_backend_device(tensor) is tensor


@pytest.mark.slow
def test_three_processes():
    alone = pruned("llama", torch.float64, 4, {"sparsity": 0.5})
    for one in together(pruned, "llama", torch.float64, 4, {"sparsity": 0.5}, processes=3):
        assert all(torch.equal(one["masks"][key], mask) for key, mask in alone["masks"].items())


def test_collectives_do_not_grow_with_the_batches():
    few = together(pruned, "llama", torch.float32, 2, {"sparsity": 0.5})
    many = together(pruned, "llama", torch.float32, 8, {"sparsity": 0.5})
    assert few[0]["collectives"] == many[0]["collectives"] == few[1]["collectives"] > 0


def test_the_main_process_writes_and_the_others_wait(tmp_path):
    found = together(pruned, "llama", torch.float32, 4, {"sparsity": 0.5}, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not list(tmp_path.glob(".*"))
    for one in found:  # both have the pruned model in memory
        for key, mask in one["masks"].items():
            assert (one["state"][key][mask] == 0).all()


def refused(output):
    try:
        pruned("llama", torch.float32, 4, {"sparsity": 0.5}, output)
    except FileExistsError as error:
        return str(error)
    return None


def test_an_error_of_the_main_process_is_everybodys(tmp_path):
    (tmp_path / "out").mkdir()
    messages = together(refused, tmp_path / "out")
    assert messages[0] == messages[1]
    assert "exists already" in messages[0]


def too_many():
    try:
        pruned("llama", torch.float32, 1, {"sparsity": 0.5})
    except ValueError as error:
        return str(error)
    return None


def test_more_processes_than_batches_are_refused():
    for message in together(too_many):
        assert "2 processes and 1 calibration batches" in message


def on_eight(name="llama", rows=32, size=4, **options):
    """A run as the last of eight processes sees it."""
    model, batches = cases.build(name), from_iterable(cases.batches(name, rows=rows, batch_size=size), "rows")
    config = cases.config(**options)
    return RunContext(model, None, find_targets(model), config, batches, Batches.none(), processes=Processes(7, 8))


@pytest.mark.parametrize("nbytes", [0, None], ids=["measured", "by estimate"])
@pytest.mark.parametrize(("name", "rows", "chosen"), [("llama", 32, 4), ("llama", 12, 1), ("mixtral", 16, 16)])
def test_auto_batches_leave_every_process_one(name, rows, chosen, nbytes, monkeypatch):
    """A mixture is probed row by row, which processes share."""
    real = measured_passes.measured_pass
    monkeypatch.setattr(
        measured_passes, "measured_pass", lambda work, one: dataclasses.replace(real(work, one), nbytes=nbytes)
    )
    for collective in ("min_", "max_", "sum_"):
        monkeypatch.setattr(Processes, collective, lambda _, tensor: tensor)
    plan = plan_memory(on_eight(name, rows, batch_size="auto"))
    assert row_count(plan.calibration.items[0]) == chosen


@pytest.mark.parametrize(("name", "rows", "size"), [("llama", 32, 4), ("llama", 10, 1), ("mixtral", 10, 4)])
def test_every_process_has_rows_to_prune_shapes_on(name, rows, size):
    """Of eight batches of four, an eighth held out, there would be seven left."""
    context = on_eight(name, rows, size, structure="auto", params=0.9)
    held_out, rest = rows_apart(context)
    assert held_out.samples + rest.samples == rows
    assert own_steps(context.model, context.targets, rest, context.processes)


@pytest.mark.parametrize("rows", [8, 1])
def test_too_few_rows_to_prune_shapes_on_are_refused_before_any_pass(rows):
    context = on_eight(rows=rows, size=1, structure="auto", params=0.9)
    if rows == 1:  # not even for one process
        context = dataclasses.replace(context, processes=Processes())
    context.model.register_forward_pre_hook(lambda *_: pytest.fail("a pass"))
    with pytest.raises(ValueError, match="num-samples"):
        plan_memory(context)


def damaged_text(folder):
    processes = join_processes()
    kept = KeptText(folder / f"text-{processes.rank}", "model", processes)
    if processes.rank == 1:
        kept.path.write_bytes(b"damaged")
    try:
        kept.read_or_write({}, lambda: pytest.fail("a text was written"))
    except ValueError as error:
        return str(error)


def test_an_error_of_any_process_is_everybodys(tmp_path):
    messages = together(damaged_text, tmp_path)
    assert messages[0] == messages[1]
    assert "text-1" in messages[0]


def one_dies(folder):
    """The second process ends in the middle of its probe; the first has to notice."""
    rank, calls = torch.distributed.get_rank(), []

    def loss_fn(model, batch):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            os._exit(7)
        return summed_loss(model, batch)[0]

    model = cases.build("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConnectionError, match="process 0 of 2 lost the others"):
        prune_pretrained(
            model,
            cases.config(sparsity=0.5),
            calibration=cases.batches("llama", batch_size=1),
            loss_fn=loss_fn,
            output_dir=folder / "out",
            progress=False,
        )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_process_that_dies_ends_the_others_with_an_error(tmp_path):
    start = time.monotonic()
    assert survivors(one_dies, tmp_path).codes == [0, 7]
    assert time.monotonic() - start < 60, "the survivor hung until a timeout"
    assert not files_of(tmp_path)


def shared_out_batches():
    model = cases.build("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"different batches .calibration.*accelerator.prepare"):
        prune_pretrained(
            model,
            cases.config(sparsity=0.5),
            calibration=cases.batches("llama", batch_size=1)[torch.distributed.get_rank() :: 2],
            evaluation=False,
            progress=False,
        )
    return all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_batches_that_are_shared_out_already_are_refused():
    assert together(shared_out_batches) == [True, True]


def different_models():
    model = cases.build("llama", seed=torch.distributed.get_rank())
    return unchanged(model, "different weights", score="magnitude")


def models_that_differ_in_a_row():
    """Which is none of those that tell models apart: only the masks do."""
    model = cases.build("llama")
    model.model.layers[0].mlp.up_proj.weight.data[1] *= 1 + torch.distributed.get_rank() * 100
    return unchanged(model, "different masks", RuntimeError, score="magnitude")


def different_options():
    """Some of them take more collectives than others."""
    rank = torch.distributed.get_rank()
    said = r"different options.*sparsity is 0\.5, 0\.25.*update is none, obs"
    return unchanged(cases.build("llama"), said, sparsity=[0.5, 0.25][rank], update=["none", "obs"][rank])


def output_of_the_main_one():
    is_main = torch.distributed.get_rank() == 0
    return unchanged(cases.build("llama"), "output_dir is given, not given", output_dir="there" if is_main else None)


def loss_of_the_main_one():
    """The sums would be of two losses."""
    is_main = torch.distributed.get_rank() == 0
    return unchanged(cases.build("llama"), "loss_fn is summed, not given", loss_fn=summed if is_main else None)


def summed(model, batch):
    return summed_loss(model, batch)[0]


def applied_in_one():
    return unchanged(cases.build("llama"), "apply is True, False", apply=torch.distributed.get_rank() == 0)


def unchanged(model, said, error=ValueError, output_dir=None, loss_fn=None, apply=True, **options):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=said):
        prune_pretrained(
            model,
            cases.config(**options),
            calibration=cases.batches("llama"),
            evaluation=False,
            output_dir=output_dir,
            loss_fn=loss_fn,
            apply=apply,
            progress=False,
        )
    return all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "call",
    [
        different_models,
        models_that_differ_in_a_row,
        different_options,
        output_of_the_main_one,
        loss_of_the_main_one,
        applied_in_one,
    ],
)
def test_processes_that_make_different_calls_are_told_so(call):
    assert together(call) == [True, True]


def main_is_late(verb):
    """The others wait longer than the group of all else would."""
    limit = timedelta(seconds=1)
    short, long = join_processes(limit), join_processes(limit * 60)
    assert join_processes(limit * 60).patient is long.patient, "one group, however many runs"
    getattr(long, verb)(partial(time.sleep, 3 * long.is_main), patiently=True)
    if short.is_main:
        time.sleep(3)
        return "late"
    with pytest.raises(ConnectionError, match="lost the others"):
        getattr(short, verb)(bool, patiently=True)
    return "gave up"


@pytest.mark.parametrize("verb", ["in_all", "on_main"])
def test_the_others_wait_as_long_as_the_main_process_works(verb):
    assert together(main_is_late, verb) == ["late", "gave up"]


def upload_that_fails(folder):
    """As the script of a sweep sees it, which goes on with the next model."""
    model = cases.build("llama")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gradprobe_hf.checkpoint.destination.check_push", lambda name, *_: name)
        patched.setattr("gradprobe_hf.checkpoint.destination.push_folder", broken_hub)
        with pytest.raises(OSError, match=r"the Hub died\. The checkpoint is kept in"):
            cases.prune(
                model,
                cases.batches("llama"),
                score="magnitude",
                apply=True,
                output_dir=folder / "out",
                push_to_hub="me/out",
            )
    return join_processes().gather(all(not bool((value == 0).all()) for value in model.parameters()))


def broken_hub(*_, **__):
    raise OSError("the Hub died.")


def test_all_processes_are_told_that_an_upload_failed(tmp_path):
    """At once, and not when the main one ends: in the meantime it would be somewhere else."""
    assert together(upload_that_fails, tmp_path) == [[True, True]] * 2


def ends(how):
    if torch.distributed.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        raise ValueError("on purpose")
    torch.distributed.barrier()  # the other does not come


# Whether the one that ended is noticed first, or the error of the other that lost it, is a race.
EXITED = "ended|in process 0.*(closed|reset) by peer"


@pytest.mark.parametrize(("how", "said"), [("exit", EXITED), ("raise", "in process 1.*on purpose")])
def test_a_function_that_fails_in_one_process_fails_its_test_and_no_other(how, said):
    """Of these tests' own processes: the failure is told at once, and what comes next has new ones."""
    start = time.monotonic()
    with pytest.raises(TeamError, match=re.compile(said, re.S)):
        together(ends, how)
    assert time.monotonic() - start < 30
    assert together(torch.distributed.get_world_size) == [2, 2]


def test_alone_every_collective_does_nothing():
    processes = Processes()
    tensor = torch.arange(3)
    assert processes.sum_(tensor) is tensor
    assert processes.all_gather(tensor)[0] is tensor
    assert processes.broadcast("x") == "x"
    assert processes.mine([1, 2, 3]) == [1, 2, 3]
    processes.barrier()
    assert processes.collectives == 0


def test_shares_are_whole_and_without_duplicates():
    items = list(range(11))
    shares = [Processes(rank, 4).mine(items) for rank in range(4)]
    assert sorted(item for share in shares for item in share) == items


def test_without_a_launcher_there_is_one_process():
    assert in_child(lambda: None) == 0
    assert join_processes().count == 1


class UnpicklableError(RuntimeError):
    def __reduce__(self):
        raise TypeError("no")


def main_fails(error):
    def work():
        raise error("the main process failed")

    def kind(do):
        with pytest.raises(RuntimeError, match="the main process failed") as raised:
            do(work)
        return type(raised.value).__name__

    return [kind(do) for do in (join_processes().on_main, join_processes().in_all)]


@pytest.mark.parametrize("error", [RuntimeError, UnpicklableError])
def test_whatever_fails_in_the_main_process_fails_in_all(error):
    """No other waits for it: an error that cannot be sent comes as its words."""
    assert together(main_fails, error) == [[error.__name__] * 2, ["RuntimeError", error.__name__]]


def test_all_know_what_the_main_process_found():
    assert together(found_by_main) == [0, 0]


def found_by_main():
    return join_processes().on_main(lambda: join_processes().rank)
