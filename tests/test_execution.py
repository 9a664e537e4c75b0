"""How a run is portioned, and what is said when memory is not enough; never what comes out."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import transformers as hf

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.data.batches import Batches, from_iterable
from gradprobe_hf.memory import accumulator_files, accumulator_place, batch_size, measured_passes
from gradprobe_hf.memory import checkpointing as checkpointing_choice
from gradprobe_hf.memory.accumulator_place import ChosenPlace, choose_place
from gradprobe_hf.memory.batch_size import largest_batch
from gradprobe_hf.memory.checkpointing import choose_checkpointing
from gradprobe_hf.memory.measured_passes import MeasuredPass
from gradprobe_hf.memory.memory_errors import remedies_for
from gradprobe_hf.model.passes.loss import LOGITS_AT_ONCE, SummedCrossEntropy, forward_only
from gradprobe_hf.model.passes.patches import checkpointed, checkpointed_layers
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.engine import ProbePass, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import Stopwatch
from tests import cases

OUT_OF_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."


def prune(name="llama", parts=None, **options):
    return prune_pretrained(
        cases.build(name),
        cases.config(**options),
        calibration=parts or cases.batches(name, rows=8),
        evaluation=False,
        progress=False,
    )


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "opt", "gpt_neox", "mixtral", "bert", "t5", "vit"])
def test_recomputing_changes_no_bit(name):
    """GPT-2 has dropout on: recomputing in train mode would draw it twice."""
    model = cases.build(name).train()
    targets = find_targets(model)
    found = []
    for checkpointing in (False, True):
        statistics = Statistics(targets, frozenset({"sequence", "token", "marginals"}), model)
        work = cases.workload(model, cases.batches(name), checkpointing=checkpointing)
        loss = run_probe(work, ProbePass(targets, statistics))
        found.append((loss, statistics))
    assert found[0][0] == found[1][0]
    for target in targets:
        for term in ("sequence", "token"):
            assert torch.equal(found[0][1][target.name].read(term), found[1][1][target.name].read(term))
    assert model.training
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_recomputing_keeps_less(monkeypatch):
    """Bytes that autograd keeps between forward and backward, of six layers."""
    model = cases.build("llama")
    layers = checkpointed_layers(model)
    assert len(layers) == 3

    def kept(which):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            embedded = model.get_input_embeddings()(cases.batches("llama")[0]["input_ids"]).requires_grad_()
            with checkpointed(model, which):
                model(inputs_embeds=embedded, use_cache=False)
        return sum(sizes)

    assert kept(layers) < kept([]) / 2


def test_forwards_are_put_back_after_a_failure():
    model = cases.build("llama")
    with pytest.raises(RuntimeError), checkpointed(model, checkpointed_layers(model)):
        raise RuntimeError
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_auto_decides_from_memory_and_says_why(monkeypatch):
    model = cases.build("llama")
    config = cases.config()
    monkeypatch.setattr(checkpointing_choice, "available_bytes", lambda _: 10**12)
    on, why = choose_checkpointing(model, config, 4, 12)
    assert (on, why[:3]) == (False, "off")
    assert "1000.0 GB are free" in why
    monkeypatch.setattr(checkpointing_choice, "available_bytes", lambda _: 1000)
    on, why = choose_checkpointing(model, config, 4, 12)
    assert (on, why[:2]) == (True, "on")
    assert "4 x 12 tokens" in why


def test_a_model_without_layers_to_recompute_says_so():
    model = cases.build("llama")
    for name in checkpointed_layers(model):  # as a model of somebody's own: blocks that transformers does not know
        layer = model.get_submodule(name)
        layer.__class__ = type("OwnLayer", (torch.nn.Module,), {"forward": type(layer).forward})
    assert not checkpointed_layers(model)
    with pytest.raises(ValueError, match="no layer that transformers can checkpoint"):
        choose_checkpointing(model, cases.config(checkpointing=True), 1, 8)
    on, why = choose_checkpointing(model, cases.config(), 1, 8)
    assert not on
    assert "no layer" in why


SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1}
GROUPED = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (hf.FalconForSequenceClassification, hf.FalconConfig(**SMALL)),
        (hf.BloomForSequenceClassification, hf.BloomConfig(**SMALL)),
        (hf.MistralForSequenceClassification, hf.MistralConfig(**GROUPED, sliding_window=8)),
        (hf.Exaone4ForSequenceClassification, hf.Exaone4Config(**GROUPED, sliding_window=8)),
        # Its forward hands on what it is given, without an argument of this name.
        (hf.Gemma3TextForSequenceClassification, hf.Gemma3TextConfig(**GROUPED, head_dim=8)),
    ],
)
def test_a_decoder_that_classifies_keeps_no_cache_that_a_recomputed_block_would_add_to(cls, config):
    torch.manual_seed(0)
    model = cls(config).eval()
    batch = {"input_ids": torch.randint(2, 64, (2, 12)), "labels": torch.tensor([0, 1])}
    assert forward_only(model, batch).past_key_values is None
    masks = [
        prune_pretrained(
            model,
            GradProbeConfig(preset="fast", checkpointing=checkpointing),
            calibration=[batch],
            evaluation=False,
            apply=False,
            progress=False,
        ).masks
        for checkpointing in (False, True)
    ]
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])


@pytest.mark.parametrize("checkpointing", [True, False, "auto"])
def test_the_report_says_how_it_was_run(checkpointing):
    report = prune(checkpointing=checkpointing).report
    assert report.execution["checkpointing"].startswith("on" if checkpointing is True else "off")
    assert report.execution["placement"] == "in memory"
    assert report.to_dict()["execution"]["processes"] == "1"


def limited(rows):
    """A loss that runs out of memory above so many rows, as torch says it."""
    real = measured_passes.run_probe

    def call(work, one):
        if max(len(batch["input_ids"]) for batch in work.batches) > rows:
            raise RuntimeError(OUT_OF_MEMORY)
        return real(work, one)

    return call


def test_auto_batches_are_the_largest_that_fit_and_change_nothing(monkeypatch):
    wanted = prune()
    monkeypatch.setattr(measured_passes, "run_probe", limited(2))
    found = prune(batch_size="auto")
    assert re.fullmatch(
        r"2 \(passes of 1, 2 take [\d.]+, [\d.]+ MB, [\d.]+ GB are free; 4 does not fit\)",
        found.report.execution["batch_size"],
    )
    assert found.report.zeros == wanted.report.zeros
    assert all((found.masks[name] == mask).float().mean() > 0.999 for name, mask in wanted.masks.items())


def taking(monkeypatch, each, room):
    """Passes that are measured to take so many bytes a row, of so many that are free."""

    real = measured_passes.measured_pass

    def measured(work, one):
        found = real(work, one)
        return dataclasses.replace(found, nbytes=each and 50 + each * found.rows)

    monkeypatch.setattr(measured_passes, "measured_pass", measured)
    monkeypatch.setattr(batch_size, "free_bytes", lambda _: room)


@pytest.mark.parametrize(
    ("room", "chosen"),
    [
        (10**9, "8 (passes of 1, 2, 4 take 0.00015, 0.00025, 0.00045 MB, 1 GB are free; 8 was tried)"),
        # 0.8 of it for 50 + 100 a row
        (700, "4 (passes of 1, 2, 4 take 0.00015, 0.00025, 0.00045 MB, 7e-07 GB are free)"),
        (300, "1 (passes of 1 take 0.00015 MB, 3e-07 GB are free)"),
    ],
)
def test_auto_batches_are_what_measured_passes_promise(monkeypatch, room, chosen):
    taking(monkeypatch, each=100, room=room)
    assert prune(batch_size="auto").report.execution["batch_size"] == chosen


def test_what_was_promised_and_does_not_fit_is_halved(monkeypatch):
    taking(monkeypatch, each=1, room=10**9)
    monkeypatch.setattr(measured_passes, "run_probe", limited(4))
    assert prune(batch_size="auto").report.execution["batch_size"].endswith("are free; 8 does not fit)")


def test_auto_batches_by_estimate_where_memory_cannot_be_measured(monkeypatch):
    taking(monkeypatch, each=None, room=1)
    monkeypatch.setattr(batch_size, "activation_bytes", lambda *a, **_: 100 * a[1])
    monkeypatch.setattr(batch_size, "available_bytes", lambda _: 700)  # 0.6 of it: room for four
    assert (
        prune(batch_size="auto").report.execution["batch_size"]
        == "4 (by estimate: this system does not tell what a pass takes; 4 was tried)"
    )


def test_checkpointing_is_decided_by_the_same_passes(monkeypatch):
    model, config = cases.build("llama"), cases.config()
    measured = [MeasuredPass(rows, False, 50 + 100 * rows, 1.0) for rows in (1, 2, 4)]
    monkeypatch.setattr(checkpointing_choice, "available_bytes", lambda _: 1000)
    on, why = choose_checkpointing(model, config, 7, 12, measured)  # 750 of 800
    assert (on, why) == (False, "off: activations of 7 x 12 tokens take by measured passes 0.0 GB, and 0.0 GB are free")
    assert choose_checkpointing(model, config, 8, 12, measured)[0]
    assert choose_checkpointing(model, config, 7, 12)[0]  # the estimate is of more


@pytest.mark.parametrize(
    ("rule", "shares_probe", "kept"), [("budget", False, 1), ("budget", True, 2), ("threshold", False, 3)]
)
def test_auto_batches_have_all_statistics_beside_them(monkeypatch, rule, shares_probe, kept):
    """A copy of a shared first probe is what the second adds to; the threshold's peaks are of each probe."""
    real, held, sizes = measured_passes.run_probe, [], []

    def remembered(*args):
        held.append(Statistics(*args))
        return held[-1]

    def weighed(*args, **kwargs):
        sizes.append(sum(statistics.nbytes for statistics in held))
        return real(*args, **kwargs)

    monkeypatch.setattr(measured_passes, "Statistics", remembered)
    monkeypatch.setattr(measured_passes, "run_probe", weighed)
    model = cases.build("llama")
    targets = find_targets(model)
    config = cases.config(batch_size="auto", rule=rule, fisher="sequence")
    batches = from_iterable(cases.batches("llama", rows=8), "rows")
    context = RunContext(model, None, targets, config, batches, Batches.none())
    largest_batch(context, ChosenPlace("same"), shares_probe)
    assert set(sizes) == {kept * 4 * sum(target.numel for target in targets)}


def placed(monkeypatch, room, host=0, disk=10**9, devices=("cpu",), rows=None, count=1, shares_probe=False, **options):
    """Where statistics of a thousand bytes on each device go, beside passes of 50 bytes, and 100 for each row."""
    taking(monkeypatch, each=100, room=room)
    model = cases.build("llama")
    targets = find_targets(model)
    on = {target.parameter: torch.device(devices[number % len(devices)]) for number, target in enumerate(targets)}
    monkeypatch.setattr(accumulator_place, "free_bytes", lambda device: room[device.type] if host else room)
    monkeypatch.setattr(accumulator_place, "available_bytes", lambda _: host)
    monkeypatch.setattr(accumulator_place, "free_disk_bytes", lambda _: disk)
    monkeypatch.setattr(accumulator_place, "accumulator_bytes", lambda *_: 1000)
    monkeypatch.setattr(accumulator_place, "execution_device", lambda _, name: on[name])
    monkeypatch.setattr(accumulator_place, "input_device", lambda _: torch.device(devices[0]))
    monkeypatch.setattr(Processes, "max_", lambda _, tensor: tensor)
    batches = from_iterable(cases.batches("llama", rows=8), "rows").in_batches_of(4)
    context = RunContext(model, None, targets, cases.config(**options), batches, Batches.none())
    return choose_place(dataclasses.replace(context, processes=Processes(0, count)), rows, shares_probe)


@pytest.mark.parametrize(
    ("room", "more", "chosen", "held"),
    [
        (4000, {}, "same", 1000),  # a quarter: no pass is measured
        (2000, {}, "same", 1000),  # 1000 + 4 x 150 of 0.8 x 2000
        (1999, {}, "disk", 0),
        (1999, {"disk": 1249}, "same", 1000),  # no room there either: what was always done
        (1438, {"batch_size": "auto"}, "same", 1000),  # 1000 + 150 of 0.8 x 1438: a batch may be as small as one row
        (1437, {"batch_size": "auto"}, "disk", 0),
        (1438, {"batch_size": "auto", "rows": 4}, "disk", 0),  # but not where its size is known
        (3250, {"shares_probe": True}, "same", 2000),  # kept twice
        (3249, {"shares_probe": True}, "disk", 0),
        (4000, {"count": 2}, "same", 2000),  # two processes: 2 x 1000 + 2 x 600 of 0.8 x 4000
        (3999, {"count": 2}, "disk", 0),
    ],
)
def test_statistics_are_in_the_first_place_that_has_room(monkeypatch, room, more, chosen, held):
    found = placed(monkeypatch, room, **more)
    assert (found.device, found.held) == (chosen, held)
    assert found.why.startswith(f"{chosen}: they take ")


@pytest.mark.parametrize(
    ("first", "second", "host", "chosen"),
    [(2000, 2000, 1, "same"), (10**6, 1999, 2500, "cpu"), (1999, 10**6, 2499, "disk"), (10**6, 10**6, 1, "same")],
)
def test_every_device_has_to_have_room_for_its_own_statistics(monkeypatch, first, second, host, chosen):
    room = {"cuda": first, "xpu": second}
    found = placed(monkeypatch, room, host=host, devices=("cuda", "xpu"))
    assert (found.device, found.held) == (chosen, 1000 if chosen == "same" else 0)


def test_a_pass_that_nobody_can_tell_has_half_of_the_memory(monkeypatch):
    monkeypatch.setattr(accumulator_place, "activation_bytes", lambda *_, **__: None)
    monkeypatch.setattr(accumulator_place, "is_sharded", lambda _: True)
    assert placed(monkeypatch, 3334).device == "same"  # 1000 + 1667 of 0.8 x 3334
    found = placed(monkeypatch, 3332)
    assert (found.device, "what a pass takes cannot be told" in found.why) == ("disk", True)


def test_the_longest_row_is_the_one_that_is_measured(monkeypatch):
    seen = []
    real = measured_passes.run_probe
    monkeypatch.setattr(measured_passes, "run_probe", lambda work, one: seen.append(work.batches[0]) or real(work, one))
    monkeypatch.setattr(accumulator_place, "free_bytes", lambda _: 1000)
    prune(parts=[{"input_ids": torch.arange(n)[None]} for n in (5, 9, 7)])
    assert {batch["input_ids"].numel() for batch in seen} == {9}


@pytest.mark.parametrize("place", ["same", "cpu", "disk"])
def test_a_place_that_was_asked_for(monkeypatch, place):
    found = placed(monkeypatch, 10, accumulator_device=place)
    assert found == ChosenPlace(place, f"{place}: as asked", 0 if place == "disk" else 1000)


def test_a_place_with_little_room_changes_no_mask(monkeypatch):
    wanted = prune()
    assert wanted.report.execution["accumulators"].startswith("same: they take")
    monkeypatch.setattr(accumulator_place, "free_bytes", lambda _: 1000)
    found = prune()
    assert re.fullmatch(
        r"disk: they take [\d.e-]+ GB, a pass [\d.e-]+ GB, and 1e-06 GB are free; [\d.]+ GB on the disk",
        found.report.execution["accumulators"],
    )
    assert all(torch.equal(found.masks[name], mask) for name, mask in wanted.masks.items())
    assert "accumulators" not in prune(score="magnitude", update="none").report.execution


def test_checkpointing_counts_what_statistics_will_take(monkeypatch):
    monkeypatch.setattr(checkpointing_choice, "available_bytes", lambda _: 10**9)
    monkeypatch.setattr(accumulator_place, "free_bytes", lambda _: 10**10)
    monkeypatch.setattr(accumulator_place, "accumulator_bytes", lambda *_: 10**9)
    assert prune().report.execution["checkpointing"].startswith("on")
    assert prune(accumulator_device="disk").report.execution["checkpointing"].startswith("off")


@pytest.mark.parametrize(
    ("free", "estimated", "on"),
    [
        (2000, 1000, True),  # close: a pass of 7 rows is measured to take 50 + 300 x 7
        (3000, 2900, False),  # close: by estimate alone it would be on
        (2000, 499, False),  # less than a fourth of what is free: nothing is measured
        (2000, 8001, True),
    ],
)
def test_checkpointing_is_measured_where_an_estimate_is_close(monkeypatch, free, estimated, on):
    taking(monkeypatch, each=300, room=10**6)
    for module in (batch_size, checkpointing_choice):
        monkeypatch.setattr(module, "available_bytes", lambda _: free)
        monkeypatch.setattr(module, "activation_bytes", lambda *given, **_: estimated * given[1] // 7)
    monkeypatch.setattr(accumulator_place, "accumulator_bytes", lambda *_: 0)
    said = prune(parts=cases.batches("llama", rows=7, batch_size=7)).report.execution["checkpointing"]
    assert said.startswith("on" if on else "off")
    assert ("by measured passes" in said) is (estimated in (1000, 2900))


def test_rows_that_do_not_fit_together_stay_as_they_are():
    parts = [{"input_ids": torch.arange(n)[None]} for n in (5, 9)]
    batches = from_iterable(parts, "parts")
    assert [item["input_ids"].tolist() for item in batches.in_batches_of(2)] == [p["input_ids"].tolist() for p in parts]
    assert batches.longest == 9
    shapes = [(3, 5), (2, 9), (2, 9)]
    ragged = from_iterable([{"input_ids": torch.ones(shape).long()} for shape in shapes], "ragged")
    apart = ragged.in_batches_of(2)
    assert [tuple(item["input_ids"].shape) for item in apart] == [(2, 5), (1, 5), (2, 9), (2, 9)]
    assert [len(item["input_ids"]) for item in apart.in_batches_of(3)] == [3, 3, 1]
    assert apart.fingerprint == ragged.fingerprint
    held_out, rest = ragged.split(0, 1 / 3)
    assert (held_out.samples, rest.samples) == (2, 5), "rows, whatever the batches are"
    patches = from_iterable([{"pixel_values": torch.ones(7, 2), "image_grid": torch.ones(3, 1)}], "patches")
    assert len(patches.in_batches_of(1)) == 1
    even = from_iterable(cases.batches("llama", rows=6), "even")
    assert [len(item["input_ids"]) for item in even.in_batches_of(4)] == [4, 2]
    assert even.in_batches_of(4).fingerprint == even.fingerprint
    assert prune(parts=parts, batch_size="auto").report.zeros > 0


def test_no_room_for_one_sequence_is_an_error(monkeypatch):
    monkeypatch.setattr(measured_passes, "run_probe", limited(0))
    with pytest.raises(MemoryError, match="not even one sequence fits"):
        prune(batch_size="auto")


@pytest.mark.parametrize(
    "error",
    [RuntimeError(OUT_OF_MEMORY), MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried")],
    ids=["cpu", "python", "cuda"],
)
@pytest.mark.parametrize("stage", ["probe_pair.run_probe", "pair_masks.select_masks"])
def test_out_of_memory_names_the_stage_and_three_remedies_in_order(stage, error, monkeypatch):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(f"gradprobe_hf.run.probing.{stage}", failing)
    with pytest.raises(MemoryError) as caught:
        prune(batch_size=2)
    said = str(caught.value)
    assert {"probe_pair.run_probe": "'probe 0'", "pair_masks.select_masks": "'candidates'"}[stage] in said
    advice = ("1. batch_size=1", "2. checkpointing=True", "3. accumulator_dtype='int8'")
    first, second, third = (said.index(one) for one in advice)
    assert first < second < third


def test_another_error_is_not_called_out_of_memory(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr("gradprobe_hf.run.probing.probe_pair.run_probe", failing)
    with pytest.raises(RuntimeError, match="something else"):
        prune()


def test_remedies_are_those_that_are_left():
    everything = cases.config(accumulator_dtype="int8", accumulator_device="disk", fisher="factored")
    assert remedies_for(everything, 1, True, True) == ["a shorter sequence_length (--sequence-length)"]
    assert remedies_for(cases.config(), 1, True, False)[0].startswith("accumulator_dtype")


@pytest.mark.parametrize("from_disk", [False, True])
def test_the_page_cache_is_left_to_the_model_where_both_do_not_fit(from_disk, tmp_path, monkeypatch):
    """The files: accumulators of one byte and 1/32 a weight, and the weights if they are on disk."""
    model = cases.build("llama")
    model.save_pretrained(tmp_path / "model")
    if from_disk:
        loaded = type(model).from_pretrained(tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path)
    else:
        loaded = model
    targets = find_targets(loaded)
    config = cases.config(fisher="sequence", accumulator_dtype="int8", accumulator_device="disk")
    files = sum(round(target.numel * (1 + 1 / 32)) for target in targets)
    files += sum(value.nbytes for value in model.parameters()) if from_disk else 0
    fits = files / accumulator_files.CACHE_SHARE
    for free, forgets in ((0.99 * fits, True), (1.01 * fits, False)):
        monkeypatch.setattr(accumulator_files, "available_bytes", lambda device, free=free: free)
        with accumulator_files.accumulator_files(loaded, targets, config, tmp_path, "disk") as storage:
            assert (storage.page_cache is not None) is forgets
            assert storage.folder.is_dir()
        assert not storage.folder.exists()


def test_what_the_page_cache_forgets_changes_no_mask(monkeypatch):
    forgotten = []
    monkeypatch.setattr("gradprobe_hf.probe.accumulation.page_cache.drop_pages", forgotten.append)
    monkeypatch.setattr(accumulator_files, "CACHE_SHARE", 0.0)
    on_disk, in_memory = (
        prune(parts=cases.batches("llama", rows=4), accumulator_dtype="int8", accumulator_device=device).masks
        for device in ("disk", "same")
    )
    assert forgotten
    assert all(torch.equal(on_disk[name], in_memory[name]) for name in in_memory)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_in_portions_is_the_loss(dtype, monkeypatch):
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 64 * 77)  # 64 rows, 64, and 22
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(150, 77, generator=draw) * 6).to(dtype)
    labels = torch.randint(77, (150,), generator=draw)
    labels[::7] = -100
    own, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    found = SummedCrossEntropy.apply(own, labels)
    wanted = torch.nn.functional.cross_entropy(reference.to(wide), labels, reduction="sum")
    (found * 1.5).backward()
    (wanted * 1.5).backward()
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found, wanted, rtol=min(close, 1e-5), atol=0)
    torch.testing.assert_close(own.grad, reference.grad, rtol=close, atol=close * 1e-1)
    assert (own.grad[::7] == 0).all()


def test_the_loss_survives_logits_that_are_not_finite():
    logits = torch.tensor([[1000.0, -1000.0], [float("-inf"), 0.0]])
    found = SummedCrossEntropy.apply(logits, torch.tensor([0, 1]))
    assert float(found) == 0.0


def test_a_stage_inside_another_is_none_of_its_time(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 6.0, 7.0, 10.0])
    monkeypatch.setattr("gradprobe_hf.runtime.stopwatch.time.perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()
    with stopwatch("units"):
        with stopwatch("probe 0"):
            assert stopwatch.so_far() == {"probe 0": 3.0, "units": 1.0}
        assert stopwatch.so_far() == {"probe 0": 5.0, "units": 2.0}
    assert stopwatch.seconds == {"probe 0": 5.0, "units": 5.0}
