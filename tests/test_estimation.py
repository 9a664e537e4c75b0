"""The estimate against what it estimates: hand arithmetic, and real passes watched on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.cli import main
from gradprobe_hf.cli.tables.estimate import print_expectations
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.footprint import footprint_of
from gradprobe_hf.estimation.formula import active_weights
from gradprobe_hf.estimation.machine import _container_room, available_bytes
from gradprobe_hf.estimation.passes import activation_bytes, by_formula, cost_of_batch
from gradprobe_hf.estimation.sizes import AccumulatorSizes, BatchSizes, ModelSizes, Sizes, accumulator_bytes
from gradprobe_hf.estimation.watch import Watch
from gradprobe_hf.memory import checkpointing
from gradprobe_hf.model.families import sample_batch
from gradprobe_hf.model.loading.checkpoint_class import model_class
from gradprobe_hf.model.loading.load import load_config, skeleton
from gradprobe_hf.model.passes import upcast
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.engine import ProbePass, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.report.against_estimate import Expectation, placement_of
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES
from tests import cases
from tests.structure_page import FAMILIES, SIZES
from tests.test_reach import llava

CONFIGS = Path(__file__).parent / "configs"
CPU = torch.device("cpu")


def block_weights(hidden, inner, heads, key_heads, experts=1):
    """Attention's four matrices, and three of each expert (or of the one feed-forward network)."""
    head = hidden // heads
    return 2 * hidden * hidden + 2 * hidden * key_heads * head + experts * 3 * hidden * inner


# name: (parameters, targets, targets that a token passes, matrices)
LARGE = {
    "mistral-7b": (7_241_732_096, 32 * block_weights(4096, 14336, 32, 8), None, 32 * 7),
    "llama-3-70b": (70_553_706_496, 80 * block_weights(8192, 28672, 64, 8), None, 80 * 7),
    "mixtral-8x7b": (
        46_702_792_704,
        32 * block_weights(4096, 14336, 32, 8, experts=8),
        32 * block_weights(4096, 14336, 32, 8, experts=2),
        32 * (4 + 8 * 2),  # an expert's gate and up are one fused matrix
    ),
}


LAYERS = 4  # of their shallow versions: what is estimated is in proportion to the depth, and so is the time


def large(name, layers=None):
    """A large model without its weights, and its targets; with fewer layers, if asked for."""
    config = load_config(str(CONFIGS / f"{name}.json"))
    config.num_hidden_layers = layers or config.num_hidden_layers
    model = skeleton(config)
    return model, find_targets(model)


@pytest.fixture(scope="module")
def shallow():
    """The large models with few layers, and what the defaults take of them where memory is no matter."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upcast, "needs_upcast", lambda _: False)  # whatever CPU this is
        for name in LARGE:
            model, targets = large(name, LAYERS)
            config = cases.config(accumulator_device="same")
            found[name] = model, targets, estimate(model, targets, config, base=0, device=CPU)
    return found


@pytest.mark.parametrize("name", LARGE)
def test_large_models_are_counted_exactly(name, shallow):
    parameters, weights, active, matrices = LARGE[name]
    model, targets = large(name)
    assert {parameter.device.type for parameter in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model.num_parameters() == parameters
    assert sum(target.numel for target in targets) == weights
    assert active_weights(model, targets) == (active or weights)
    assert len(targets) == matrices
    model, _, found = shallow[name]
    share = LAYERS / large(name)[0].config.num_hidden_layers
    assert found.parameters == model.num_parameters()
    assert found.target_weights == share * weights
    assert found.active_target_weights == share * (active or weights)
    assert found.matrices == share * matrices
    assert found.dtype == "bfloat16"


@pytest.mark.slow
def test_a_70b_model_fits_no_usual_machine():
    model, targets = large("llama-3-70b")
    found = estimate(model, targets, cases.config(), base=0, device=CPU)
    assert found.parameters == LARGE["llama-3-70b"][0]
    assert not found.placements[0].fits or available_bytes(CPU) > 480e9


@pytest.mark.parametrize("name", LARGE)
def test_operations_are_the_products_attention_and_the_head(name, shallow):
    """Per token 6 N for the targets, 4 for head and router (no gradient of theirs), and attention over all tokens."""
    model, _, found = shallow[name]
    config, tokens = model.config, 128 * 512
    router = config.num_hidden_layers * config.hidden_size * getattr(config, "num_local_experts", 0)
    head = config.hidden_size * config.vocab_size
    attention = 2 * 2 * 512 * config.hidden_size * config.num_hidden_layers
    # nothing before the first block needs a gradient: its queries, keys and values make none for their input
    keys = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    first = 2 * config.hidden_size * (config.hidden_size + 2 * keys)
    forward = 2 * found.active_target_weights + 2 * (head + router) + attention
    backward = 4 * found.active_target_weights + 2 * (head + router) + attention * 5 // 2 - first
    assert found.work["resident"].flops == 2 * tokens * (forward + backward)
    again = forward - 2 * config.hidden_size * config.vocab_size  # the head is outside of the blocks
    assert found.work["checkpointed"].flops == 2 * tokens * (forward + backward + again)
    assert (found.work["resident"].forwards, found.work["checkpointed"].forwards) == (2, 4)


def test_what_a_large_model_takes(shallow):
    """bfloat16 weights, float32 accumulators, a bit per mask and target; one block and the head when offloaded."""
    model, targets, found = shallow["llama-3-70b"]
    parameters, weights = model.num_parameters(), sum(target.numel for target in targets)
    resident, _, offloaded = found.placements
    stage = next(stage for stage in resident.stages if stage.name == "probe")
    probe = {item.label: item.bytes for item in stage.items}
    assert probe["weights"] == 2 * parameters
    assert probe["accumulators"] == 4 * weights
    assert probe["masks"] == weights // 8
    assert probe["logits and their loss"] == 2 * 2 * 4 * 512 * 128256
    assert resident.peak("host") == sum(probe.values())
    block = block_weights(8192, 28672, 64, 8) + 2 * 8192
    away = {item.label: item.bytes for item in offloaded.stages[1].items}
    assert away["weights"] == 2 * (block + 8192 * 128256)
    # a hidden state per block, one block's own activations, and less than one more block
    hidden = LAYERS * 4 * 512 * 8192 * 2
    assert hidden < away["activations"] < hidden + 2 * (probe["activations"] - hidden) / LAYERS
    assert found.work["offloaded"].bytes_read == 2 * 2 * 32 * 2 * parameters  # 2 probes, 2 walks each, 32 batches


@pytest.mark.parametrize(
    ("options", "bytes_per_weight"),
    [
        ({}, 4),
        ({"fisher": "token"}, 4),
        ({"fisher": "factored"}, 0),
        ({"accumulator_dtype": "bfloat16"}, 2),
        ({"accumulator_dtype": "int8"}, 1 + 2 / 64),
        ({"rule": "threshold"}, 3 * 4),  # blend, and the peaks of two probes
        ({"rule": "threshold", "score": "wanda"}, 2 * 4),
        ({"score": "magnitude"}, 0),
    ],
)
def test_accumulators_by_hand(options, bytes_per_weight):
    assert accumulator_bytes(cases.config(**options), 6400) == bytes_per_weight * 6400


@pytest.mark.parametrize("fisher", FISHER_ESTIMATES)
def test_accumulators_are_what_the_engine_makes(fisher):
    model = cases.build("llama")
    targets = find_targets(model)
    made = Statistics(targets, frozenset(FISHER_ESTIMATES[fisher].terms), model).nbytes
    assert accumulator_bytes(cases.config(fisher=fisher), sum(target.numel for target in targets)) == made


def test_accumulators_on_disk_leave_memory():
    model, targets = large("mistral-7b", LAYERS)
    config = cases.config(score="magnitude")
    here, away = (
        footprint_of("resident", sizes_with(AccumulatorSizes(10**9, where)), NOTHING, {"host": 1, "disk": 1})
        for where in ("same", "disk")
    )
    assert here.stages[1].bytes_on("host") - away.stages[1].bytes_on("host") == 10**9
    assert away.peak("disk") - here.peak("disk") == 10**9
    found = estimate(model, targets, config, device=CPU)
    assert found.batches == found.work["resident"].flops == 0


@pytest.mark.parametrize(("options", "sets"), [({}, 2), ({"dense_target": 0.0}, 1)])
def test_a_reconstruction_by_hand(options, sets):
    """Hessians of q, k, v, o, gate and up `[4096, 4096]`, and of down `[14336, 14336]`."""
    model, targets = large("mistral-7b", LAYERS)
    config = cases.config(update="obs", num_samples=16, score="magnitude", **options)
    resident, _, offloaded = estimate(model, targets, config, device=CPU).placements
    stage = next(stage for stage in resident.stages if stage.name == "reconstruct")
    items = {item.label: item.bytes for item in stage.items}
    assert items["Hessians of a block"] == sets * 4 * (6 * 4096**2 + 14336**2)
    assert items["hidden states between two blocks"] == 2 * sets * 16 * 512 * 4096 * 2
    weights = sum(target.numel for target in targets)
    assert items["new weights"] == 2 * weights
    away = next(stage for stage in offloaded.stages if stage.name == "reconstruct")
    assert {item.label: item.device for item in away.items}["new weights"] == "disk"
    plain = estimate(model, targets, cases.config(score="magnitude"), device=CPU)
    assert "reconstruct" not in [stage.name for stage in plain.placements[0].stages]


NOTHING = BatchSizes(peak=0)


def sizes_with(accumulators, stored=0):
    model = ModelSizes(10**8, stored, block=10**6, ends=10**6, targets=10**7, largest_target=10**4, itemsize=2)
    return Sizes(0, model, accumulators, None, sparsity=0.5)


def test_it_fits_to_the_byte_and_a_mapped_file_makes_room():
    sizes = sizes_with(AccumulatorSizes(0, "same"), stored=10**12)
    needed = footprint_of("resident", sizes, NOTHING, {"host": 0, "disk": 0}).needed("host")
    assert needed < 10**12 < footprint_of("resident", sizes, NOTHING, {"host": 0, "disk": 0}).peak("host")
    for short in (0, 1):
        assert footprint_of("resident", sizes, NOTHING, {"host": needed - short, "disk": 10**12}).fits == (not short)


def test_accumulators_go_where_a_placement_fits():
    here = sizes_with(AccumulatorSizes(10**9, "same"))
    needed = footprint_of("resident", here, NOTHING, {"host": 0, "disk": 0}).needed("host")
    sizes = sizes_with(AccumulatorSizes(10**9, "auto"))
    for short, where in ((0, "host"), (1, "disk")):
        room = {"host": needed - short, "disk": 10**12}
        found = footprint_of("resident", sizes, NOTHING, room)
        (item,) = [item for item in found.stages[1].items if item.label == "accumulators"]
        assert (found.fits, item.device) == (True, where)


def test_what_cuda_takes_is_there_at_every_stage():
    """The host has no weights then, and the libraries; the device has the weights, and workspaces of cuBLAS."""
    sizes = sizes_with(AccumulatorSizes(10**9, "same"))
    alone = footprint_of("resident", sizes, NOTHING, {"host": 0, "disk": 0})
    beside = footprint_of("resident", sizes, NOTHING, {"host": 0, "accelerator": 0, "disk": 0})
    for one, other in zip(alone.stages, beside.stages, strict=True):
        process = next(item.bytes for item in one.items if item.label == "Python, libraries, tokenizer")
        assert other.bytes_on("host") >= process + 10**9, one.name
        assert other.bytes_on("accelerator") >= 10**8 + 64 * 2**20, one.name
    needed = beside.needed("accelerator")
    for short in (0, 1):
        room = {"host": 10**12, "accelerator": needed - short, "disk": 10**12}
        assert footprint_of("resident", sizes, NOTHING, room).fits == (not short)


def real_pass(model, targets, batch):
    """(bytes that autograd saved, peak, operations) of the engine's own probe on the CPU."""
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor):
        alive.append(tensor.detach())  # so that no address is used twice
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    statistics = Statistics(targets, frozenset({"sequence"}), model)
    work = cases.workload(model, [batch])
    kept = [statistics[target.name].read("sequence") for target in targets]
    own = [*model.parameters(), *model.buffers()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_probe(work, ProbePass(targets, statistics))
    of_the_model = {tensor.untyped_storage().data_ptr() for tensor in [*own, *batch.values()]}
    saved = {key: size for key, size in saved.items() if key not in of_the_model}
    with Watch([*own, *kept, *batch.values()]) as watch:
        run_probe(work, ProbePass(targets, statistics))
    return sum(saved.values()), watch.peak, watch.flops


def test_experts_chosen_by_a_number_for_each_block_are_counted():
    sizes = {"num_experts": 4, "moe_topk": [2, 2], "num_hidden_layers": 2, "head_dim": 4}
    config = HunYuanMoEV1Config(**SIZES | sizes)
    model = skeleton(config, HunYuanMoEV1ForCausalLM)
    targets = find_targets(model)
    experts = [target for target in targets if target.expert is not None]
    whole, active = (sum(target.numel for target in some) for some in (targets, experts))
    assert active_weights(model, targets) == whole - active // 2
    assert estimate(model, targets, cases.config(), device=CPU).work["resident"].flops > 0


@pytest.mark.parametrize("name", [name for name in cases.CASES if name != "mixtral"])
def test_a_simulated_pass_is_the_real_one(name):
    model, length = cases.build(name), 48
    batch = cases.batches(name, rows=2, length=length)[0]
    targets = find_targets(model)
    saved, peak, flops = real_pass(model, targets, batch)
    without = skeleton(model.config, type(model))
    found = cost_of_batch(without, find_targets(without), 2, length)
    assert found.simulated
    # T5's labels are three tokens shorter than what the estimate takes them to be.
    tolerance = 0.12 if name == "t5" else 0.02
    assert found.saved_bytes == pytest.approx(saved, rel=tolerance)
    assert found.peak_bytes == pytest.approx(peak, rel=max(0.1, tolerance))
    assert found.flops == pytest.approx(flops, rel=tolerance)


def test_experts_share_their_tokens_evenly():
    """Routing decides where rows go, not how many there are."""
    model = cases.build("mixtral")
    targets, batch = find_targets(model), cases.batches("mixtral", rows=1, length=48, batch_size=1)[0]
    saved, peak, flops = real_pass(model, targets, batch)
    without = skeleton(model.config, type(model))
    found = cost_of_batch(without, find_targets(without), 4, 48)  # four sequences, one at a time
    assert found.simulated
    assert found.saved_bytes == pytest.approx(saved, rel=0.15)  # what each expert is sent is indexed separately
    assert found.peak_bytes == pytest.approx(peak, rel=0.15)
    assert found.flops == pytest.approx(flops, rel=0.02)


DEEP = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, **cases.CAUSAL)


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing():
    def of(rows, length, checkpointed=False, dtype=torch.float32):
        model = skeleton(DEEP, LlamaForCausalLM, dtype)
        return activation_bytes(model, rows, length, checkpointed=checkpointed)

    assert of(1, 64) < of(2, 64) < of(4, 64)
    assert of(1, 32) < of(1, 64) < of(1, 128)
    assert of(4, 64) == pytest.approx(4 * of(1, 64), rel=0.05)
    assert of(4, 128, checkpointed=True) < 0.6 * of(4, 128)
    assert of(4, 64, dtype=torch.bfloat16) < of(4, 64)
    assert of(4, 64) == of(4, 64)


def test_a_class_that_cannot_be_made_gets_no_number_and_is_checkpointed(monkeypatch):
    class WithCode(LlamaForCausalLM):
        def __init__(self, config, made_of=None):
            if made_of is None:
                raise RuntimeError("not without its weights")
            super().__init__(config)

    assert activation_bytes(LlamaForCausalLM(DEEP), 2, 64, checkpointed=False) > 0
    for checkpointed in (False, True):
        assert activation_bytes(WithCode(DEEP, "weights"), 2, 64, checkpointed=checkpointed) is None
    monkeypatch.setattr(checkpointing, "activation_bytes", lambda *_, **__: None)
    chosen, why = checkpointing.choose_checkpointing(cases.build("llama"), cases.config(), 2, 64)
    assert chosen
    assert "cannot be told" in why


def test_a_simulation_leaves_the_skeleton_as_it_was():
    model = skeleton(DEEP)
    targets = find_targets(model)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    cost_of_batch(model, targets, 1, 16, checkpoint=True)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_model_that_needs_data_gets_a_formula(monkeypatch):
    """The formula is rough: within a factor of two where the simulation is known."""
    model, targets = large("mistral-7b")  # its head is a small part of it
    known = cost_of_batch(model, targets, 1, 512)
    monkeypatch.setattr(type(model), "forward", lambda _, **batch: batch["input_ids"].sum().item())
    rough = cost_of_batch(model, targets, 1, 512)
    assert known.simulated
    assert not rough.simulated
    assert rough == by_formula(model, targets, 1, 512)
    assert known.flops == pytest.approx(rough.flops, rel=0.1)
    assert 0.5 < known.peak_bytes / rough.peak_bytes < 2
    notes = estimate(model, targets, cases.config(), device=CPU).notes
    assert any("formula" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({}, 3),
        ({"fisher": "factored"}, 2),
        pytest.param({"fisher": "token"}, 3, marks=pytest.mark.slow),
        ({"probes": 1}, 1.5),
    ],
)
def test_terms_decide_what_a_probe_multiplies(options, products):
    model = skeleton(DEEP)
    targets = find_targets(model)
    config = cases.config(num_samples=4, sequence_length=16, **options)
    found = estimate(model, targets, config, device=CPU).work["resident"].flops
    base = estimate(model, targets, cases.config(num_samples=4, sequence_length=16), device=CPU)
    tokens, weights = 4 * 16, active_weights(model, targets)
    if options == {"probes": 1}:
        assert found == base.work["resident"].flops / 2
    else:
        assert base.work["resident"].flops - found == 2 * tokens * 2 * weights * (3 - products)


def test_free_memory_is_below_a_containers_limit(tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    for group, limit in ((tmp_path / "outer", "1000"), (inner, "max")):
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text("700")
        (group / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    assert _container_room(tmp_path, tmp_path / "membership") == [400]
    assert _container_room(tmp_path, tmp_path / "no such file") == []
    assert available_bytes(CPU) > 0


def test_the_command_prints_a_table(capsys, tmp_path):
    model, _ = large("mixtral-8x7b", 2)
    model.config.save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path), "--sequence-length", "64"]) == 0
    said = capsys.readouterr().out
    parameters = f"{model.num_parameters():,} parameters"
    for word in (parameters, "resident", "checkpointed", "offloaded", "accumulators", "fits here"):
        assert word in said


def test_a_model_without_an_embedding_of_tokens(tmp_path, capsys):
    model = cases.build("vit")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "ViTForImageClassification" in said
    assert "calibration: 32 batches of 4 images, or recordings" in said
    assert main(["estimate", str(tmp_path), "--sequence-length", "64"]) == 1
    assert "no text is cut" in capsys.readouterr().err


def test_hidden_states_of_images_are_those_of_their_patches():
    vit = cases.build("vit")  # of 8 x 8 pixels, in patches of 4 x 4
    model = skeleton(vit.config, type(vit))
    kept = [
        item.bytes
        for stage in estimate(model, find_targets(model), GradProbeConfig(num_samples=10)).placements[0].stages
        for item in stage.items
        if item.label == "hidden states between two blocks"
    ]
    assert kept == [2 * 2 * 10 * 5 * 16 * 4]  # of the model as pruned so far, and of the dense one


def test_json_is_the_whole_of_standard_output(tmp_path, capsys):
    """A folder with nothing but config.json is enough: no weight is looked for."""
    DEEP.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    arguments = ["--json", "--dtype", "float16", "--batch-size", "2", "--num-samples", "6", "--resume"]
    assert main(["estimate", str(tmp_path), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dtype"], found["batches"]) == ("float16", 3)
    assert [one["name"] for one in found["placements"]] == ["resident", "checkpointed", "offloaded"]
    for one in found["placements"]:
        assert one["peak_bytes"]["host"] == max(
            sum(item["bytes"] for item in items if item["device"] == "host") for items in one["stages"].values()
        )
        assert math.isfinite(one["work"]["flops"])
    written = [item["label"] for item in found["placements"][0]["stages"]["save"] if item["device"] == "disk"]
    assert written == ["checkpoint", "snapshots for resuming"]


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("nobody/no-such-model", [], "cannot load 'nobody/no-such-model'"),
        ("mistral-7b.json", ["--dtype", "int7"], "dtype must be 'bfloat16'"),
        ("mistral-7b.json", ["--include", "nothing"], "matches no prunable module"),
        ("mistral-7b.json", ["--sparsity", "2"], "sparsity must be a fraction"),
    ],
)
def test_wrong_input_is_one_readable_line(model, arguments, message, capsys):
    path = CONFIGS / model
    assert main(["estimate", str(path) if path.is_file() else model, *arguments]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("gradprobe: error: ")
    assert message in said.err
    assert said.out == ""


def test_the_class_is_the_checkpoints():
    config = cases.build("bert").config
    config.architectures = ["BertForMaskedLM"]
    assert type(skeleton(config)) is type(skeleton(config, model_class(config)))


def counted(model, rows, length):
    """Operations of one forward pass, as torch counts them while it computes; it does not look into fused attention."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(rows, length, dtype=torch.long), use_cache=False)
    return counter.get_total_flops()


def test_the_text_that_a_model_writes_and_is_measured_on_is_counted():
    model = cases.build("llama")
    config = GradProbeConfig(num_samples=130, sequence_length=16)
    found = estimate(skeleton(model.config, type(model)), find_targets(model), config, device=CPU)
    text, evaluation = found.written, found.measured
    of_a_window = counted(model, 1, 16)
    assert (text.windows, text.at_once, text.passes) == (130, 64, 3 * 15)
    assert text.flops == pytest.approx(of_a_window * 130 * 15 / 16)
    heads, vocabulary = model.config.num_key_value_heads, model.config.vocab_size
    kept = 2 * model.config.num_hidden_layers * heads * model.config.head_dim * 16 * 4
    assert text.bytes == 64 * (kept + 4 * 4 * vocabulary)
    assert (evaluation.windows, evaluation.passes) == (20, 2 * 5)
    assert evaluation.flops == pytest.approx(of_a_window * 2 * 20)
    assert evaluation.bytes > 2 * 4 * 16 * vocabulary * 4, "logits of both models"
    stages = {one.name: [stage.name for stage in one.stages] for one in found.placements}
    assert stages["resident"] == ["load", "write", "probe", "decide", "reconstruct", "measure", "save"]
    assert "write" not in stages["offloaded"], "it would read every weight for every token"


@pytest.mark.parametrize("structure", [{"ffn": 8}, {"kv_groups": 1}, {"ffn": 8, "blocks": 1}])
def test_a_structure_leaves_a_smaller_checkpoint(structure, checkpoint, tmp_path):
    options = {"structure": structure, "update": "none"}
    meta = skeleton(load_config(str(checkpoint)))
    found = estimate(meta, find_targets(meta), GradProbeConfig(**options))
    cases.prune(str(checkpoint), cases.batches("llama"), **options, output_dir=tmp_path / "made")
    written = sum(one.nbytes for one in load_file(tmp_path / "made" / "model.safetensors").values())
    for placement in found.placements:
        (item,) = [item for item in placement.stages[-1].items if item.label == "checkpoint"]
        assert item.bytes == written < meta.num_parameters() * 4


def test_a_search_is_measured_again_and_again():
    model = cases.build("llama")
    searched = cases.config(max_metric_drop=1, sparsity=0.5, sparsity_step=0.25, num_samples=4, sequence_length=16)
    found = estimate(skeleton(model.config, type(model)), find_targets(model), searched, device=CPU)
    # 0.25 and 0.5, six bisections of 0.25 down to 0.005, and the dense model, each on 3 batches of one half.
    assert found.measured.passes == 3 * (2 + 6 + 1) + 3 * 2


def test_a_search_updates_the_weights_of_each_budget():
    model = cases.build("llama")
    searched = {"max_metric_drop": 1, "sparsity_step": 0.25}

    def work(**options):
        config = cases.config(sparsity=0.5, num_samples=4, sequence_length=16, **options)
        return estimate(skeleton(model.config, type(model)), find_targets(model), config, device=CPU).work["resident"]

    plain, updated = work(), work(update="obs")
    once = updated.flops - plain.flops
    more = work(update="obs", **searched).flops - work(**searched).flops
    assert more == pytest.approx((2 + 6 + 1) * once, rel=1e-6)


def test_another_evaluation_than_the_usual_is_not_counted():
    model = cases.build("llama")
    config = cases.config(evaluation_protocol="paper")
    found = estimate(skeleton(model.config, type(model)), find_targets(model), config, device=CPU)
    assert found.measured is None
    assert any("whole test split" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_what_writes_no_text_has_none_counted(kind):
    model = cases.build(kind)
    found = estimate(skeleton(model.config, type(model)), find_targets(model), cases.config(), device=CPU)
    assert found.written is None
    assert found.measured is None


def test_a_forward_pass_alone_is_priced_whole():
    model = cases.build("llama")
    config = GradProbeConfig(score="wanda", num_samples=8, sequence_length=16)
    found = estimate(skeleton(model.config, type(model)), find_targets(model), config, device=CPU)
    assert found.work["resident"].flops == pytest.approx(2 * counted(model, 4, 16))


def test_an_estimate_of_a_vision_language_model_says_that_images_come_on_top():
    model = llava()
    found = estimate(skeleton(model.config, type(model)), find_targets(model), cases.config(), device=CPU)
    unseen = [target for target in find_targets(model) if "vision" in target.name]
    (note,) = (one for one in found.notes if "image" in one)
    assert f"on text alone, {len(unseen)} matrices" in note
    assert unseen


def test_a_run_beside_its_estimate(tmp_path, capsys):
    """Of the run's own options and placement: passes as they were counted, memory near the peak, no option besides."""
    model = cases.build("llama")
    model.save_pretrained(tmp_path / "dense")
    config = GradProbeConfig(probes=2, batch_size=2, checkpointing=True)
    rows = [{"input_ids": torch.randint(0, 256, (1, 16)), "labels": torch.randint(0, 256, (1, 16))}] * 4
    out = tmp_path / "pruned"
    prune_pretrained(model, config, calibration=rows, evaluation=False, output_dir=out, progress=False)
    assert main(["estimate", str(tmp_path / "dense"), "--measured", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["written"], printed["measured"]) == (None, None)  # by default; this run read neither
    found = {one["what"]: one for one in printed["against_measured"]}
    assert (found["forward passes"]["estimated"], found["forward passes"]["measured"]) == (4, 4)
    assert found["memory of the host"]["measured"] > 2**20
    print_expectations([Expectation(**one) for one in found.values()])
    shown = capsys.readouterr().out
    assert "backward passes" in shown
    assert f"{found['memory of the host']['measured'] / 1e6:,.0f} MB" in shown  # as cards, reports and estimates say it
    assert main(["estimate", str(tmp_path / "dense"), "--measured", str(out), "--sparsity", "0.6"]) == 1
    assert "--sparsity has no effect with --measured" in capsys.readouterr().err
    cases.build("gpt2").save_pretrained(tmp_path / "other")
    assert main(["estimate", str(tmp_path / "other"), "--measured", str(out)]) == 1
    assert "was pruned from another model" in capsys.readouterr().err
    report = json.loads((out / "gradprobe_report.json").read_text())
    (out / "gradprobe_report.json").write_text(json.dumps(report | {"recovery": {"steps": 1}}))
    assert main(["estimate", str(tmp_path / "dense"), "--measured", str(out)]) == 1
    assert "was recovered behind its pruning" in capsys.readouterr().err


def test_a_run_in_another_dtype_is_estimated_in_that(tmp_path, capsys):
    cases.build("llama", torch.bfloat16).save_pretrained(tmp_path / "dense")
    given = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False, "dtype": "float32"}
    config = GradProbeConfig(score="magnitude")
    prune_pretrained(tmp_path / "dense", config, **given, output_dir=tmp_path / "out")
    assert main(["estimate", str(tmp_path / "dense"), "--measured", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


def test_the_placement_that_a_run_had():
    assert placement_of({"placement": "offloaded by Accelerate", "checkpointing": "on: ..."}) == "offloaded"
    assert placement_of({"placement": "in memory", "checkpointing": "on, as asked"}) == "checkpointed"
    assert placement_of({"placement": "in memory", "checkpointing": "off: ..."}) == "resident"


def test_a_configuration_with_an_infinite_value_is_estimated():
    """transformers writes it into JSON as something else, which the configuration does not take back."""
    (family,) = (one for one in FAMILIES if one.name == "Falcon-H1")
    model = family.make()
    assert math.inf in model.config.time_step_limit
    assert activation_bytes(model, 2, 12, checkpointed=False) > 0


def test_what_a_model_of_speech_writes_is_no_longer_than_it_can():
    """Whisper reads 1,500 frames and writes 448 tokens at most: the default length was refused, and a formula stood in
    that sees none of the frames."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_target_positions": 48}
    model = skeleton(WhisperConfig(**sizes, **heads), WhisperForConditionalGeneration)
    batch = sample_batch(model, 2, 512)
    assert batch["labels"].shape == (2, 48)
