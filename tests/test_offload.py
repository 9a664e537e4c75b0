"""A model that is not in memory gives the same bits as one that is, and its files are safe."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import tempfile
import weakref
from contextlib import contextmanager

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gradprobe_hf.checkpoint.smaller as smaller
import gradprobe_hf.checkpoint.write as hub
import gradprobe_hf.model.files.offload_store as store
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.model.files.saving import save_in_shards
from gradprobe_hf.model.files.shard_files import join
from gradprobe_hf.model.loading.load import load_config, load_model, skeleton
from gradprobe_hf.model.loading.ties import forget_false_ties
from gradprobe_hf.model.parameters import (
    OffloadedParameter,
    aliases,
    input_device,
    is_offloaded,
    parameter_bytes,
    read_weight,
)
from gradprobe_hf.model.passes.routing import routed
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.engine import ProbePass, run_probe
from gradprobe_hf.probe.maps import measured
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.request.compatibility import check_editable
from gradprobe_hf.run.request.weight_limits import weight_limits
from gradprobe_hf.run.shapes.structured import packed
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from tests import cases
from tests.grids import grid, some

TERMS = frozenset({"sequence", "token", "marginals", "peak"})
CPU = torch.device("cpu")


def candidates(targets):
    generator = torch.Generator().manual_seed(3)
    return {target.name: torch.rand(target.shape, generator=generator) < 0.4 for target in targets}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny checkpoints by family."""
    folders = {}

    def folder_of(name, dtype=torch.float32):
        if (name, dtype) not in folders:
            folders[name, dtype] = tmp_path_factory.mktemp("models") / name
            cases.build(name, dtype).save_pretrained(folders[name, dtype])
            cases.tokenizer().save_pretrained(folders[name, dtype])
        return folders[name, dtype]

    return folder_of


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def block_level(model):
    """One hook a block, that loads all of the block."""
    for block in model.model.layers:
        weights = {name: value.detach().clone() for name, value in block.state_dict().items()}
        add_hook_to_module(block, AlignDevicesHook(CPU, offload=True, weights_map=weights, place_submodules=True))
    return model


def mixed(model, folder):
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


PLACEMENTS = {
    "in memory": lambda source, _: load(source),
    "cpu_offload": lambda source, _: cpu_offload(load(source), CPU),
    "disk_offload": lambda source, folder: disk_offload(load(source), folder, CPU),
    "dispatch_model": lambda source, folder: mixed(load(source), folder),
    "device_map disk": lambda source, folder: load(source, device_map={"": "disk"}, offload_folder=folder),
    "device_map mixed": lambda source, folder: load(
        source,
        device_map={
            "model.embed_tokens": "disk",
            "model.layers": "disk",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        },
        offload_folder=folder,
    ),
    "blocks": lambda source, _: block_level(load(source)),
}


def both_probes(model, name, checkpointing):
    targets = find_targets(model)
    check_editable(model, targets)
    statistics = Statistics(targets, TERMS, model)
    work = cases.workload(model, cases.batches(name), checkpointing=checkpointing)
    losses = [run_probe(work, ProbePass(targets, statistics))]
    statistics.probe = 1
    losses.append(run_probe(work, ProbePass(targets, statistics, shrunk=candidates(targets), factor=0.1)))
    return targets, statistics, losses


def assert_same_statistics(found, wanted, targets):
    for target in targets:
        for term in ("sequence", "token", "peak"):
            assert torch.equal(found[target.name].read(term), wanted[target.name].read(term)), (target.name, term)
        assert torch.equal(found[target.name].factored(), wanted[target.name].factored()), target.name


@grid("placement, checkpointing", list(PLACEMENTS), {"recomputed": True, "kept": False})
def test_every_placement_gives_the_same_bits(placement, checkpointing, saved, tmp_path):
    targets, wanted, losses = both_probes(load(saved("llama")), "llama", False)
    model = PLACEMENTS[placement](saved("llama"), tmp_path)
    assert is_offloaded(model) == (placement != "in memory")
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    _, found, again = both_probes(model, "llama", checkpointing)
    assert_same_statistics(found, wanted, targets)
    assert again == losses
    # nothing is left on the model: no hook of ours, no flag, no weight that a pass has loaded
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == forwards


@grid("name, dtype", ["tied", "gpt2", "opt", "mixtral"], [torch.float32, torch.bfloat16])
def test_every_family_from_disk_gives_the_same_bits(name, dtype, saved, tmp_path):
    folder = saved(name, dtype)
    targets, wanted, _ = both_probes(load(folder), name, False)
    for checkpointing in (False, True):
        model = load(folder, device_map={"": "disk"}, offload_folder=tmp_path / str(checkpointing))
        assert_same_statistics(both_probes(model, name, checkpointing)[1], wanted, targets)


@contextmanager
def counted_weights(model):
    """The most bytes of weights alive at once: storages that the hooks have loaded and nobody has let go."""
    alive, most, known = [0], [0], {}
    original = AlignDevicesHook.pre_forward

    def count(tensor):
        storage = tensor.untyped_storage()
        if id(storage) in known and known[id(storage)]() is storage:
            return
        known[id(storage)] = weakref.ref(storage)
        size = tensor.nbytes
        alive[0] += size
        most[0] = max(most[0], alive[0])
        weakref.finalize(storage, lambda: alive.__setitem__(0, alive[0] - size))

    def watched(hook, module, *args, **kwargs):
        found = original(hook, module, *args, **kwargs)
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                count(parameter)
        return found

    read = measured.MeasuredLinear.backward

    def reading(ctx, grad):
        if ctx.fetch is not None:
            fetch = ctx.fetch

            def fetched():
                weight = fetch()
                count(weight)
                return weight

            ctx.fetch = fetched
        return read(ctx, grad)

    AlignDevicesHook.pre_forward = watched
    measured.MeasuredLinear.backward = staticmethod(reading)
    try:
        yield most
    finally:
        AlignDevicesHook.pre_forward = original
        measured.MeasuredLinear.backward = staticmethod(read)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_weights_alive_at_once_stay_near_one_block(checkpointing, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        **cases.CAUSAL | {"vocab_size": 64, "bos_token_id": 60, "eos_token_id": 61, "pad_token_id": 62},
    )
    model = disk_offload(LlamaForCausalLM(config).eval(), tmp_path, CPU)
    total = sum(parameter.nbytes for parameter in model.parameters())
    targets = find_targets(model)
    statistics = Statistics(targets, frozenset({"sequence"}), model)
    ids = [{"input_ids": torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(1))}]
    gc.collect()
    gc.disable()  # what is let go must be let go by reference counts alone
    try:
        with counted_weights(model) as most:
            run_probe(cases.workload(model, ids, checkpointing=checkpointing), ProbePass(targets, statistics))
    finally:
        gc.enable()
    assert 0.02 < most[0] / total <= 0.30, f"{most[0] / total:.2f} of the model was alive at once"


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def some_masks(model):
    targets = find_targets(model)
    return targets, candidates(targets)


@grid("name, placement", ["llama", "tied", "gpt2", "mixtral"], ["device_map disk", "disk_offload", "cpu_offload"])
def test_zeros_go_to_the_store_and_never_to_the_checkpoint(name, placement, saved, tmp_path):
    before = digest(saved(name))
    model = PLACEMENTS[placement](saved(name), tmp_path)
    targets, masks = some_masks(model)
    dense = {target.name: target.matrix(model).clone() for target in targets}
    with applied(model, targets, masks, keep=False):
        for target in targets:
            assert (target.matrix(model)[masks[target.name]] == 0).all()
    assert all(torch.equal(target.matrix(model), dense[target.name]) for target in targets)
    with applied(model, targets, masks):
        pass
    resident = load(saved(name))
    with applied(resident, targets, masks):
        pass
    for target in targets:
        assert torch.equal(target.matrix(model), target.matrix(resident))
    for alias, canonical in aliases(model).items():
        assert torch.equal(read_weight(model, alias), read_weight(model, canonical))
    ids = cases.batches(name)[0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, resident(input_ids=ids).logits)
    assert digest(saved(name)) == before


def test_tied_embeddings_are_changed_under_every_name(saved, tmp_path):
    model = PLACEMENTS["disk_offload"](saved("tied"), tmp_path)
    targets = find_targets(model, include=["embed_tokens"])
    with applied(model, targets, candidates(targets)):
        pass
    mask = candidates(targets)[targets[0].name]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert (read_weight(model, name)[mask] == 0).all()


@grid(
    "placement, options",
    ["cpu_offload", "disk_offload", "device_map disk"],
    {"zeros": {"score": "magnitude"}, "auto": {"structure": "auto", "params": 0.97, "update": "none"}},
)
def test_tied_embeddings_count_once_wherever_they_are(placement, options, saved, tmp_path):
    """Offloaded, each of their names has a parameter of its own."""

    def sizes(where):
        model = PLACEMENTS[where](saved("tied"), tmp_path / where)
        result = cases.prune(model, cases.batches("tied", length=24), apply=False, **options)
        result.save_pretrained(tmp_path / f"{where} pruned")
        report = json.loads((tmp_path / f"{where} pruned" / "gradprobe_report.json").read_text())
        shapes = report["structure"] and report["structure"]["parameters"]
        return report["model"]["parameters"], shapes, report["files"]["dense"], result.report.sparsity

    alone = sizes("in memory")
    assert alone[0] == load(saved("tied")).num_parameters()
    assert sizes(placement) == alone


@pytest.mark.parametrize("placement", ["disk_offload", "device_map disk"])
def test_a_store_that_cannot_be_written_is_as_it_was(placement, saved, tmp_path, monkeypatch):
    model = PLACEMENTS[placement](saved("llama"), tmp_path)
    targets, masks = some_masks(model)
    dense = {target.name: target.matrix(model).clone() for target in targets}
    files = sorted(path.name for path in tmp_path.rglob("*"))
    writers = {"disk_offload": "_replace_file", "device_map disk": "save_file"}
    real, calls = getattr(store, writers[placement]), []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(store, writers[placement], full)
    with pytest.raises(OSError, match="No space"), applied(model, targets, masks):
        pass
    assert len(calls) == 4
    assert all(torch.equal(target.matrix(model), dense[target.name]) for target in targets)
    left = sorted(path.name for path in tmp_path.rglob("*") if not path.name.startswith("gradprobe-"))
    assert left == [name for name in files if not name.startswith("gradprobe-")]


def prune(model, output, name="llama", **options):
    return prune_pretrained(
        model,
        cases.config(num_samples=4, sequence_length=12, **options.pop("config", {})),
        calibration=cases.batches(name),
        evaluation=cases.batches(name, seed=7),
        output_dir=output,
        progress=False,
        **options,
    )


def tensors_in(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@some("name", ["llama", "tied", "mixtral"], fast=("mixtral",))
def test_a_model_from_disk_ends_as_one_in_memory(name, saved, tmp_path):
    before = digest(saved(name))
    wanted = prune(saved(name), tmp_path / "memory", name)
    found = prune(saved(name), tmp_path / "disk", name, device_map="disk")
    assert is_offloaded(found.model)
    for key in wanted.masks:
        assert torch.equal(found.masks[key], wanted.masks[key])
    assert found.report.evaluation == wanted.report.evaluation
    assert found.report.execution["placement"] == "offloaded by Accelerate"
    first, second = tensors_in(tmp_path / "memory"), tensors_in(tmp_path / "disk")
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert inspect_checkpoint(tmp_path / "disk").zeros == wanted.report.zeros
    assert (load(tmp_path / "disk")(input_ids=torch.arange(9)[None]).logits).isfinite().all()
    assert digest(saved(name)) == before
    # what is in memory afterwards is the pruned model
    target = found.targets[0]
    assert (target.matrix(found.model)[found.masks[target.name]] == 0).all()


@pytest.fixture(scope="module")
def said_to_be_tied(saved, tmp_path_factory):
    """A checkpoint whose head is not its embeddings, though its configuration says so."""
    folder = tmp_path_factory.mktemp("models") / "said to be tied"
    shutil.copytree(saved("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "in memory"])
def test_a_head_that_is_not_the_embeddings_is_saved_from_disk(by_name, said_to_be_tied, tmp_path):
    """transformers compares the two in memory alone."""
    options = {"device_map": "disk", "offload_folder": tmp_path / "off"}
    model = said_to_be_tied if by_name else PLACEMENTS["device_map disk"](said_to_be_tied, tmp_path / "off")
    prune(model, tmp_path / "out", **(options if by_name else {}))
    source, written = tensors_in(said_to_be_tied), tensors_in(tmp_path / "out")
    assert written.keys() == source.keys()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(written[name], source[name])


def test_a_head_that_was_parted_in_memory_is_saved(tmp_path):
    model = cases.build("tied")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    save_in_shards(tmp_path, model)
    assert torch.equal(tensors_in(tmp_path)["lm_head.weight"], model.lm_head.weight)


def test_a_tied_head_on_disk_is_read_of_one_place(saved, tmp_path, monkeypatch):
    model = PLACEMENTS["device_map disk"](saved("tied"), tmp_path)
    monkeypatch.setattr(OffloadedParameter, "read", lambda _: pytest.fail("read"))
    forget_false_ties(model)
    assert "lm_head.weight" in model.all_tied_weights_keys


def test_a_plan_leaves_room_for_the_run(saved, tmp_path, monkeypatch):
    """Weights may take what an offloaded run leaves, where a resident one does not fit."""
    wanted = prune(saved("llama"), tmp_path / "whole", device_map="auto")
    assert not is_offloaded(wanted.model)
    monkeypatch.setattr("gradprobe_hf.estimation.footprint.SMALLEST_SHARD", 1)  # it is more than all of this model
    bare = skeleton(load_config(saved("llama")))
    on_disk = wanted.config.varied(accumulator_device="disk")  # statistics leave before weights do
    found = estimate(bare, find_targets(bare), on_disk, base=0, device=torch.device("cpu"))
    beside = found.placements[-1].beside_weights("host")
    weights = sum(value.nbytes for value in wanted.model.parameters())
    monkeypatch.setattr("gradprobe_hf.run.request.weight_limits.process_bytes", lambda: 0)
    resident = found.placements[1].needed("host")
    monkeypatch.setattr("gradprobe_hf.estimation.estimate.available_bytes", lambda _: resident)
    assert weight_limits(bare, wanted.config)["cpu"] == resident  # all fit, and Accelerate wants room for a layer
    assert weight_limits(bare, wanted.config, processes=2)["cpu"] < resident // 2  # in half of it they do not
    for left in (weights * 9 // 10, 0):
        monkeypatch.setattr("gradprobe_hf.estimation.estimate.available_bytes", lambda _, left=left: beside + left)
        assert weight_limits(bare, wanted.config)["cpu"] == pytest.approx(left, abs=1000)
        found = prune(saved("llama"), tmp_path / str(left), device_map="auto")
        places = set(found.model.hf_device_map.values())
        assert places == ({"cpu", "disk"} if left else {"disk"})
        for key in wanted.masks:
            assert torch.equal(found.masks[key], wanted.masks[key])


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, True),
        ({"score": "wanda"}, True),  # no probe, and no statistics of weights
        ({"update": "sparsegpt"}, True),
        ({"score": "magnitude"}, False),
        ({"structure": "auto", "params": 0.75}, False),
    ],
)
@pytest.mark.parametrize("name", ["llama", "mixtral", "bert", "t5", "vit"])
def test_whatever_is_pruned_has_a_plan_or_none(name, options, asked):
    model = cases.build(name)
    bare = skeleton(model.config, type(model))
    limits = weight_limits(bare, GradProbeConfig(**options))
    assert (limits is not None) is asked
    assert limits is None or limits["cpu"] > 0


def test_a_run_that_trains_has_its_weights_in_memory(saved, monkeypatch):
    """An offloaded one is not estimated, for it is refused: where the whole does not fit, nothing is left free."""
    monkeypatch.setattr("gradprobe_hf.estimation.estimate.available_bytes", lambda _: 1000)
    monkeypatch.setattr("gradprobe_hf.run.request.weight_limits.process_bytes", lambda: 0)
    bare = skeleton(load_config(saved("llama")))
    assert weight_limits(bare, GradProbeConfig(recovery_steps=2))["cpu"] == 1000


def test_devices_that_nothing_is_known_of_are_left_to_accelerate(saved, monkeypatch):
    """Limits would leave them out, and the model would go to the CPU."""
    bare = skeleton(load_config(saved("llama")))
    assert weight_limits(bare, cases.config())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert weight_limits(bare, cases.config()) is None


def test_limits_that_were_given_are_kept(saved, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr("gradprobe_hf.run.request.inputs.weight_limits", never)
    found = prune(saved("llama"), tmp_path / "given", device_map="auto", max_memory={"cpu": 10_000})
    assert is_offloaded(found.model)
    assert not is_offloaded(prune(saved("llama"), tmp_path / "named", device_map="cpu").model)  # no plan


def test_shards_are_written_one_at_a_time(saved, tmp_path, monkeypatch):
    import gradprobe_hf.model.files.saving as shards

    monkeypatch.setattr(shards, "SMALLEST_SHARD", 1)
    monkeypatch.setattr(shards, "LARGEST_SHARD", 20_000)
    wanted = prune(saved("mixtral"), tmp_path / "whole", "mixtral").model.state_dict()
    several = {f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)}
    for largest, files in ((10**9, {"model.safetensors"}), (40_000, several)):
        # What fits into one file of the usual size is one in the end.
        monkeypatch.setattr("gradprobe_hf.model.files.shard_files.LARGEST_FILE", largest)
        out = tmp_path / str(largest)
        prune(saved("mixtral"), out, "mixtral", device_map="disk", apply=False)
        assert {file.name for file in out.glob("*.safetensors")} == files
        model = load(out)
        assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())


def test_files_of_several_types_are_joined_to_one(tmp_path):
    pieces = [
        {"a": torch.arange(3, dtype=torch.bfloat16), "b": torch.zeros(2, 0), "c": torch.tensor(5, dtype=torch.uint8)},
        {"d": torch.randn(4, 5), "e": torch.ones(2, dtype=torch.float16)},
    ]
    for number, piece in enumerate(pieces):
        save_file(piece, tmp_path / f"{number}.partial", metadata={"format": "pt"})
    join(sorted(tmp_path.iterdir()), tmp_path / "model.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    wanted = pieces[0] | pieces[1]
    assert found.keys() == wanted.keys()
    assert all(found[key].dtype == one.dtype and torch.equal(found[key], one) for key, one in wanted.items())


def test_a_dry_run_writes_nothing_to_the_store(saved, tmp_path):
    model = PLACEMENTS["disk_offload"](saved("llama"), tmp_path / "store")
    before = digest(tmp_path / "store")
    result = prune(model, tmp_path / "out", apply=False)
    assert digest(tmp_path / "store") == before
    result.save_pretrained(tmp_path / "again")
    assert digest(tmp_path / "store") == before
    assert tensors_in(tmp_path / "again").keys() == tensors_in(tmp_path / "out").keys()


def test_a_failed_save_leaves_the_offloaded_model_alone(saved, tmp_path, monkeypatch):
    model = PLACEMENTS["device_map disk"](saved("llama"), tmp_path / "off")
    targets = find_targets(model)
    dense = {target.name: target.matrix(model).clone() for target in targets}
    monkeypatch.setattr(hub, "save_in_shards", lambda *_, **__: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        prune(model, tmp_path / "out")
    assert all(torch.equal(target.matrix(model), dense[target.name]) for target in targets)
    assert not (tmp_path / "out").exists()


def test_a_device_map_that_names_no_module_is_refused_with_the_name(saved):
    with pytest.raises(ValueError, match=r"'model.layerz'.*did you mean 'model.layers'"):
        prune_pretrained(saved("llama"), device_map={"model.layerz": "disk", "": "cpu"})


def test_a_store_without_room_is_refused_before_any_work(saved, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=10))
    monkeypatch.setattr("gradprobe_hf.run.probing.probe_pair.run_probe", lambda *_, **__: pytest.fail("began to work"))
    with pytest.raises(OSError, match=r"offload_folder"):
        prune_pretrained(
            saved("llama"), calibration=cases.batches("llama"), device_map="disk", offload_folder=tmp_path / "off"
        )


def test_a_store_and_a_checkpoint_have_to_fit_together(saved, tmp_path, monkeypatch):
    model = PLACEMENTS["disk_offload"](saved("llama"), tmp_path / "off")
    parameters = {target.parameter for target in find_targets(model)}
    changed = sum(model.get_parameter(name).nbytes for name in parameters)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=changed + whole - 1))
    store.check_store_room(model, parameters)
    with pytest.raises(OSError, match="what is saved, with the pruned weights"):
        store.check_store_room(model, parameters, tmp_path / "not" / "there" / "yet")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=changed + whole))
    store.check_store_room(model, parameters, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "placement", "times"),
    [("mixtral", "device_map disk", 2), ("mixtral", "in memory", 1), ("llama", "device_map disk", 1)],
)
def test_a_smaller_mixture_and_what_it_is_looked_at_through_have_to_fit(
    name, placement, times, saved, tmp_path, monkeypatch
):
    """transformers fuses experts as it loads them, and writes them where it offloads them to."""
    model = PLACEMENTS[placement](saved(name), tmp_path / "off")
    usage, nbytes = shutil.disk_usage(tmp_path), parameter_bytes(model)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage._replace(free=times * nbytes))
    hub.check_room(tmp_path / "out", model, is_smaller=True)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage._replace(free=times * nbytes - 1))
    with pytest.raises(OSError, match="nothing was written"):
        hub.check_room(tmp_path / "out", model, is_smaller=True)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage._replace(free=nbytes))
    hub.check_room(tmp_path / "out", model)


def test_a_smaller_mixture_is_looked_at_on_the_disk_that_it_is_on(saved, tmp_path, monkeypatch):
    model = PLACEMENTS["device_map disk"](saved("mixtral"), tmp_path / "off")
    removal = Removal.example(Plan.of(model, find_targets(model), {"experts": 1}))
    elsewhere, folder = tmp_path / "small", tmp_path / "large" / "out"
    elsewhere.mkdir()
    folder.mkdir(parents=True)
    seen, compared = [], smaller.MaskedOutputs.difference

    def written(masked, loaded):
        seen.extend(path.parent.parent for path in tmp_path.rglob("*.safetensors") if "check-" in str(path))
        return compared(masked, loaded)

    monkeypatch.setattr(smaller.MaskedOutputs, "difference", written)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    with applied(model, find_targets(model), packed(removal, find_targets(model))), routed(model, removal.routes):
        smaller.save_smaller(folder, model, removal)
    assert set(seen) == {folder.parent}
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_accumulators_without_room_are_refused_and_leave_nothing(saved, tmp_path, monkeypatch):
    calls = []

    def full(*_):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradprobe_hf.probe.accumulation.storage.os.posix_fallocate", full)
    with pytest.raises(OSError, match="--offload-folder"):
        prune_pretrained(
            load(saved("llama")),
            cases.config(accumulator_device="disk"),
            calibration=cases.batches("llama"),
            offload_folder=tmp_path / "off",
            progress=False,
        )
    assert not list((tmp_path / "off").iterdir())


def test_one_weight_on_two_devices_is_refused(saved, tmp_path):
    model = PLACEMENTS["device_map disk"](saved("tied"), tmp_path)
    model.lm_head.weight = torch.nn.Parameter(read_weight(model, "lm_head.weight").clone())
    del model.lm_head._hf_hook
    with pytest.raises(ValueError, match="only one of them is offloaded"):
        check_editable(model, find_targets(model, include=["embed_tokens"]))


def test_a_meta_model_without_hooks_is_refused():
    with torch.device("meta"):
        model = cases.CASES["llama"].make()
    with pytest.raises(ValueError, match="no Accelerate hook"):
        check_editable(model, find_targets(model))


def test_batches_go_where_the_model_computes(saved, tmp_path):
    assert input_device(PLACEMENTS["device_map disk"](saved("llama"), tmp_path)) == CPU


def test_what_an_interrupted_pass_left_in_the_model_is_not_taken_for_the_weights(saved, tmp_path):
    """Accelerate unloads a module behind its forward, and not when that raises: zeros written there would be lost."""
    model = PLACEMENTS["disk_offload"](saved("llama"), tmp_path / "off")
    names = [target.parameter for target in find_targets(model)]

    def interrupted(*_):
        raise KeyboardInterrupt

    module = model.model.layers[1].mlp.up_proj
    module._old_forward, real = interrupted, module._old_forward
    with pytest.raises(KeyboardInterrupt):
        model(**cases.batches("llama")[0])
    module._old_forward = real
    assert any(not model.get_parameter(name).is_meta for name in names), "it was left there"
    config = cases.config(score="magnitude")
    result = prune_pretrained(model, config, evaluation=False, progress=False)
    for target in result.targets:
        assert int((target.matrix(model) == 0).sum()) == int(result.masks[target.name].sum())
    assert all(model.get_parameter(name).is_meta for name in names)


def test_a_model_that_does_not_load_leaves_nothing_behind(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    weights = saved("llama") / "model.safetensors"
    broken = shutil.copytree(saved("llama"), tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(OSError, match="damaged"):
        prune_pretrained(broken, device_map="disk", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_two_models_in_one_offload_folder_are_two(tmp_path):
    """transformers writes fused experts there by the names of parameters."""
    models = []
    for seed in (0, 1):
        cases.build("mixtral", seed=seed).save_pretrained(tmp_path / str(seed))
        models.append(load_model(tmp_path / str(seed), device_map="disk", offload_folder=tmp_path / "off"))
    name = next(name for name, _ in models[0].named_parameters() if "experts.gate_up" in name)
    alone = [load_model(tmp_path / str(seed)).get_parameter(name) for seed in (0, 1)]
    for model, wanted in zip(models, alone, strict=True):
        assert torch.equal(read_weight(model, name), wanted)
    del models, model
    gc.collect()
    assert list((tmp_path / "off").iterdir()) == []
