"""Stages of a step, whatever it is that a loop calls; and a callback's watch, which always comes off."""

from __future__ import annotations

import os
import time
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gradprobe_hf.cli.main import main
from gradprobe_hf.profiling import ProfileCallback, ProfileReport, Schedule, profiled
from gradprobe_hf.profiling.fixing.changes import CHANGES
from gradprobe_hf.profiling.observing import recorder
from gradprobe_hf.profiling.observing.call_watch import _Called, _cast, _waits
from gradprobe_hf.profiling.observing.modules import ModuleWatch
from gradprobe_hf.profiling.script import profile_script
from gradprobe_hf.runtime.device_time import now
from gradprobe_hf.training import SelectiveUpdateCallback, attached
from tests import cases, planted, trainers

SHORT = Schedule(3, 4, 1, 1)


@pytest.fixture(autouse=True)
def untouched():
    """Whatever a test does, torch is as it was."""
    planted.forget_compilations()
    marks = [torch.autograd.backward, torch.autograd.grad, _BaseDataLoaderIter.__next__]
    yield
    assert [torch.autograd.backward, torch.autograd.grad, _BaseDataLoaderIter.__next__] == marks
    assert not torch_optimizer._global_optimizer_pre_hooks


class Around(nn.Module):
    """What a loop never calls: its method is, or what is inside of it."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def training_step(self, x):
        return self.inside(x).square().mean()


def by_backward(loss, _):
    loss.backward()


def by_grad(loss, parameters):
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def watched(holder, loss_of, differentiate=by_backward, model=None):
    parameters = list(holder.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    with profiled(model, schedule=SHORT) as profiler:
        while not profiler.done:
            differentiate(loss_of(torch.rand(64, planted.WIDTH)), parameters)
            optimizer.step()
            optimizer.zero_grad()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in holder.modules())
    return profiler.report()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_model_inside_of_what_holds_the_parameters(depth, is_given):
    """As under an adapter whose base is called, and in a `training_step`: its pass was none, and nothing said so."""
    net = planted.Net()
    holder = net
    for _ in range(depth):
        holder = Around(holder)
    report = watched(holder, lambda x: net(x).square().mean(), model=holder if is_given else None)
    assert report.shares["forward"] > 0.01  # it was 0, and how much it is depends on the machine
    assert "told apart" not in report.markdown()


def test_two_models_in_one():
    """As a generator and a discriminator, in a list."""
    nets = nn.ModuleList(planted.Net() for _ in range(2))
    report = watched(Around(nets), lambda x: sum(net(x).square().mean() for net in nets))
    assert report.shares["forward"] > 0.01  # it was 0, and how much it is depends on the machine


def test_a_module_that_is_compiled_in_place():
    net = planted.Net()
    net.compile(backend="eager")
    compiled = net._compiled_call_impl
    report = watched(Around(net), lambda x: net(x).square().mean())
    assert report.shares["forward"] > 0.01  # it was 0, and how much it is depends on the machine
    assert net._compiled_call_impl is compiled
    assert not report.observation.graph_breaks, "no mark was compiled with it"
    assert "torch.compile was used" in report.not_evaluable["synchronization"]
    torch._dynamo.reset()


def test_gradients_that_are_returned():
    net = planted.Net()
    report = watched(net, lambda x: net(x).square().mean(), by_grad)
    assert report.shares["backward"] > 0.01  # it was 0, and how much it is depends on the machine


def test_a_pass_that_is_not_seen_is_told():
    net = planted.Net()
    report = watched(net, lambda x: (x @ net.layers[0].weight).square().mean())
    assert report.shares["forward"] == 0
    assert "The forward pass was not told apart: no call of the model was seen" in report.markdown()
    assert "The backward pass" not in report.markdown()


def test_batches_that_were_there_before_are_no_evaluations_to_come():
    """A step's own passes without gradients, the logits of a reference say, belong to it."""
    net, passes = planted.Net(), []
    net.layers[0].register_forward_hook(lambda *_: time.sleep(1e-3))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batches = list(DataLoader(planted.Rows(), 32))[:20]
    with profiled(schedule=Schedule(4, 5, 1, 1)) as profiler:
        for batch in batches:
            with torch.no_grad():
                passes += [net(batch).mean() for _ in range(20)]
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    seen = profiler.report().observation
    assert seen.complete
    assert seen.stages["forward"] >= 21e-3 * len(seen.timed), "of 21 passes"


CALLED_BACK = """
import sys
sys.path.insert(0, {root!r})
from gradprobe_hf.profiling import ProfileCallback, Schedule
from tests import cases, trainers
callback = ProfileCallback(Schedule(1, 1, 1, 1), save={saved!r})
trainers.trained(cases.build("llama"), {folder!r}, [callback], max_steps=20)
print(len(callback.report().observation.timed))
"""


def test_a_callback_takes_part_in_a_script_that_is_profiled(tmp_path, capsys):
    root, saved = os.getcwd(), tmp_path / "own.json"
    path = tmp_path / "train.py"
    path.write_text(CALLED_BACK.format(root=root, saved=str(saved), folder=str(tmp_path / "out")))
    ran = profile_script(str(path), [], Schedule(2, 3, 1, 1), whole_run=True)
    assert ran.exit_code == 0
    assert len(ran.report.observation.timed) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "3", "one watch has seen them"
    assert not saved.exists()


def test_a_training_that_failed_is_watched_no_more_by_the_next(tmp_path):
    first, second = ProfileCallback(SHORT), ProfileCallback(Schedule(1, 2, 1, 1))
    model = cases.build("llama")
    broken = trainers.Trainer(
        model, trainers.arguments(tmp_path), train_dataset=trainers.Rows(fails_at=0), callbacks=[first]
    )
    with pytest.raises(RuntimeError, match="a broken row"):
        broken.train()
    trainers.trained(model, tmp_path, [second], max_steps=5)
    assert first._recorder.done
    assert len(second.report().observation.timed) == 2


def test_a_script_that_goes_to_another_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "reports").mkdir()
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        f"os.chdir({str(tmp_path / 'elsewhere')!r})\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(30):\n"
        "    model(torch.ones(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "script", "train.py", "--json", "reports/r.json", "--timed", "2"]) == 0
    assert len(ProfileReport.read(tmp_path / "reports" / "r.json").observation.timed) == 2
    assert not list((tmp_path / "elsewhere").iterdir())
    capsys.readouterr()


def test_what_is_changed_is_the_model_that_is_trained():
    """Not the teacher, which is called before it."""
    teacher, student = cases.build("llama"), cases.build("llama", seed=1)
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    with CHANGES["checkpointing"].made() as done:
        with torch.no_grad():
            teacher(**batch)
        frozen = cases.build("llama", seed=2).requires_grad_(False)
        frozen(**batch)
        student(**batch)
    assert done == ["gradient checkpointing on"]
    assert [one.is_gradient_checkpointing for one in (teacher, frozen, student)] == [False, False, True]


def test_the_remedy_of_one_optimizer_is_not_another_optimizer():
    def remedy_of(kind):
        net = planted.Net()
        optimizer = kind(net.parameters(), lr=1e-3, foreach=False)
        with profiled(schedule=SHORT) as profiler:
            while not profiler.done:
                net(torch.rand(8, planted.WIDTH)).square().mean().backward()
                optimizer.step()
        return next(one.remedy for one in profiler.report().findings if one.kind == "optimizer")

    assert "adamw" not in remedy_of(torch.optim.SGD)
    assert "optim='adamw_torch_fused'" in remedy_of(torch.optim.AdamW)


def test_padding_of_what_a_decoder_reads():
    model = cases.build("t5")
    labels = torch.full((1, 12), -100)
    labels[:, :3] = 5
    ids = torch.ones(1, 4, dtype=torch.long)
    rows = [{"input_ids": ids, "attention_mask": ids, "labels": labels}] * 12
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with profiled(schedule=SHORT) as profiler:
        for batch in DataLoader(rows, batch_size=None):
            model(**batch).loss.backward()
            optimizer.step()
    contents = profiler.report().observation.contents
    assert (contents.tokens, contents.padding) == (16 * contents.steps, 9 * contents.steps)


def test_gradients_that_a_callback_drops_are_no_finding():
    model, made = cases.build("llama"), cases.batches("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        attached(SelectiveUpdateCallback(top_k=1, groups="matrix"), model, optimizer),
        profiled(model, schedule=SHORT) as profiler,
    ):
        while not profiler.done:
            model(**made[0], labels=made[0]["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report = profiler.report()
    assert "SelectiveUpdateCallback drops some" in report.not_evaluable["parameter without gradient"]
    assert "parameter without gradient" not in {one.kind for one in report.findings}


def test_shares_of_modules_are_of_all_of_them():
    """Of more kinds than are shown, too."""
    layers = nn.Sequential(OrderedDict((chr(97 + at) * 3, nn.Linear(8, 8)) for at in range(24)))
    watch = ModuleWatch(lambda: False)
    watch.start([layers])
    layers(torch.ones(2, 8))
    watch.stop()
    assert not watch.times(), "the step has not come to its end"
    watch.keep()
    *shown, others = watch.times()
    assert (len(shown), others.name, others.kind, others.count) == (20, "(others)", "5 more", 5)
    assert sum(one.seconds for one in watch.times()) == pytest.approx(sum(watch._seconds.values()))


def test_no_mark_is_compiled_with_a_function_that_calls_the_model():
    """An error of the loop's where the graph has to be whole, and graph breaks and compilations of the marks."""
    net = planted.Net()

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x):
        return net(x).square().mean()

    report = watched(net, loss_of, model=net)
    assert not report.observation.graph_breaks
    torch._dynamo.reset()


def test_a_run_that_ends_within_a_located_step_has_its_report(tmp_path):
    net, steps = planted.Net(), SHORT.warmup + SHORT.timed + SHORT.traced
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def loop():
        with profiled(net, schedule=SHORT, save=tmp_path / "report.md"):
            for step in range(steps + 1):
                loss = net(torch.rand(64, planted.WIDTH)).square().mean()
                if step == steps:
                    raise ValueError("the loop's own")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(ValueError, match="the loop's own"):
        loop()
    assert "A step takes" in (tmp_path / "report.md").read_text()


def test_of_several_optimizers_the_slow_one_is_named_with_its_own_tensors():
    few, many = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    first, second = torch.optim.AdamW(few.parameters(), fused=True), torch.optim.Adam(many.parameters(), foreach=False)
    with profiled(nn.ModuleList([few, many]), schedule=SHORT) as profiler:
        while not profiler.done:
            many(few(torch.rand(4, 8))).square().mean().backward()
            second.step()
            first.step()
            second.zero_grad()
            first.zero_grad()
    (found,) = (one for one in profiler.report().findings if one.kind == "optimizer")
    assert "Adam steps 60 tensors one after the other" in found.evidence
    assert "with 1 other optimizer;" in found.evidence


def test_a_hook_of_ones_own_behind_the_last_step_is_called():
    """The watch's own was removed while torch went through all of them."""
    called, net = [], planted.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with profiled(net, schedule=SHORT) as profiler:
        handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append(1))
        for _ in range(SHORT.steps + 2):
            net(torch.rand(64, planted.WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        assert profiler.done
        assert not torch_optimizer._global_optimizer_post_hooks, "removed with the next pass"
    assert len(called) == SHORT.steps + 2


def test_norms_are_seen_behind_one_in_front_of_backward():
    net = planted.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with profiled(net, schedule=SHORT) as profiler:
        while not profiler.done:
            x = torch.rand(64, planted.WIDTH)
            net(x / x.norm()).square().mean().backward()
            for parameter in net.parameters():
                parameter.grad.norm()
            optimizer.step()
            optimizer.zero_grad()
    assert sum(one.count for one in profiler.report().observation.calls if one.kind == "norm") > 1


def test_what_is_written_to_is_no_constant():
    net = planted.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with profiled(net, schedule=SHORT) as profiler:
        while not profiler.done:
            x = torch.full((64, planted.WIDTH), -1.0)
            x[:, 0] = torch.rand(64)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "constant" not in {one.kind for one in profiler.report().observation.calls}


class Packed(torch.utils.data.IterableDataset):
    """Reads another loader, as data sets that pack do."""

    def __iter__(self):
        while True:
            yield from DataLoader(planted.Rows(), 8)


def test_a_loader_inside_of_another_is_no_second_one():
    net = planted.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with profiled(net, schedule=SHORT) as profiler:
        for batch in DataLoader(Packed(), batch_size=None):
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if profiler.done:
                break
    seen = profiler.report().observation
    assert seen.contents.samples == 8 * seen.contents.steps
    assert [one.dataset for one in seen.loaders] == ["Packed"]


class OnAnAccelerator:
    is_on_accelerator = True


@pytest.mark.parametrize(("waits", "tensor"), [(False, torch.ones(2)), (True, torch.ones(2, device="meta"))])
def test_reading_what_is_on_the_cpu_waits_for_no_accelerator(waits, tensor):
    assert bool(_waits(OnAnAccelerator(), _Called("synchronization", ".tolist()", (tensor,), []))) is waits
    beside = _Called("cast", ".to", (torch.ones(2, device="meta"),), torch.ones(2), is_waited_for=False)
    assert _cast(OnAnAccelerator(), beside) is None


def test_a_module_that_is_half_made_ends_no_loop():
    half = nn.Module.__new__(nn.Module)
    net = planted.Net()
    assert watched(net, lambda x: net(x).square().mean()).step_seconds
    assert not vars(half)


def test_a_step_ends_when_the_device_has_come_to_its_end(monkeypatch):
    """Kernels of a GPU are put in a queue: here a step's take 30 ms, for which only a synchronization waits."""
    left = []

    def slow(device):
        assert torch.device(device) == torch.device("cpu")  # where the loop's model is
        time.sleep(sum(left))
        left.clear()
        return time.perf_counter()

    monkeypatch.setattr(recorder, "now", slow)
    report = planted.train(schedule=SHORT, at_end=lambda _: left.append(0.03))
    assert len(report.observation.timed) == 4
    assert min(report.observation.timed) >= 0.03


def test_what_is_in_the_queue_of_cuda_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    before = now("cpu")
    assert not waited
    assert now(torch.device("cuda", 1)) > before
    assert waited == [torch.device("cuda", 1)]
