"""The same on a GPU as on the CPU: what is pruned, measured, trained, resumed and timed there. `make test-gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from gradprobe_hf import GradProbeConfig, RecoveryConfig, bench_pretrained, prune_pretrained, recover_pretrained
from gradprobe_hf.model.passes.patches import own_draws
from gradprobe_hf.training import StatePruningCallback
from tests import cases
from tests.trainers import Rows, arguments, half_pruned

# Asked for where there is none, they fail: all of them skipped would look like a GPU that passes.
pytestmark = pytest.mark.skipif("GRADPROBE_GPU" not in os.environ, reason="`make test-gpu`, where there is a GPU")

GPU = "cuda:0"
METHODS = {
    "magnitude": {"score": "magnitude"},
    "wanda": {"score": "wanda"},
    "one probe": {"probes": 1},
    "two probes": {"probes": 2},
    "factored": {"probes": 2, "fisher": "factored"},
    "sequential": {"probes": 2, "order": "sequential"},
    "obs": {"probes": 1, "update": "obs"},
    "sparsegpt": {"update": "sparsegpt"},
    "best": {"preset": "best"},
    "blocks": {"preset": "best", "refinement": "blocks"},
    "2:4": {"preset": "best", "pattern": "2:4"},
    "int8": {"probes": 2, "accumulator_dtype": "int8"},
    "on the host": {"probes": 2, "accumulator_device": "cpu"},
    "ffn": {"structure": {"ffn": 8}},
    "blocks away": {"structure": {"blocks": 1}},
}


def pruned(model, **options):
    batches = cases.batches("llama", rows=8, length=16)
    return cases.prune(model, batches, evaluation=cases.batches("llama", seed=5), **options)


@pytest.fixture(autouse=True)
def full_precision():
    """Products of float32 are products of float32, as on the CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_decides_as_on_the_cpu(method):
    options = METHODS[method] if "structure" in METHODS[method] else {"sparsity": 0.5, **METHODS[method]}
    here, there = (pruned(cases.build("llama").to(device), **options) for device in ("cpu", GPU))
    assert there.report.evaluation["dense"]["loss"] == pytest.approx(here.report.evaluation["dense"]["loss"], rel=1e-5)
    assert there.report.evaluation["pruned"]["loss"] == pytest.approx(
        here.report.evaluation["pruned"]["loss"], rel=1e-2
    )
    assert there.report.zeros == here.report.zeros
    if "structure" not in options:
        masks = {name: mask.cpu() for name, mask in there.masks.items()}
        # Sums are taken in another order, and neighbours in the ranking may change places.
        assert cases.differing(dict(here.masks), masks) <= 0.02 * here.report.weights


def test_a_model_of_a_name_is_pruned_there_and_loads_anywhere(checkpoint, text_file, tmp_path):
    config = GradProbeConfig(sparsity=0.5, num_samples=4, sequence_length=16)
    result = prune_pretrained(
        str(checkpoint), config, calibration=str(text_file), output_dir=tmp_path / "half", progress=False
    )
    assert {parameter.device.type for parameter in result.model.parameters()} == {torch.device(GPU).type}
    assert result.report.memory["peak_cuda_bytes"] > 0
    stored = load_file(tmp_path / "half" / "model.safetensors")
    for name, mask in result.masks.items():
        weight = stored[name if name in stored else f"{name}.weight"]
        assert torch.equal(weight == 0, mask.cpu()), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, result.model.get_parameter(name).cpu()), name


def test_parts_on_the_gpu_and_parts_beside_it_give_the_same(tmp_path):
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    places |= {"model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "disk"}
    for name in ("two probes", "best"):
        whole = pruned(cases.build("llama").to(GPU), sparsity=0.5, **METHODS[name])
        model = dispatch_model(cases.build("llama"), places, offload_dir=tmp_path / name, force_hooks=True)
        parts = pruned(model, sparsity=0.5, **METHODS[name])
        assert cases.differing(_on_cpu(whole.masks), _on_cpu(parts.masks)) == 0, name
        assert parts.report.evaluation["pruned"]["loss"] == pytest.approx(
            whole.report.evaluation["pruned"]["loss"], rel=1e-6
        )


def test_a_run_that_was_stopped_goes_on_to_the_same_masks(tmp_path):
    whole, passes = counted(cases.build("llama").to(GPU))
    wanted = pruned(whole, sparsity=0.5, probes=2)
    # One to see what a pass reaches, four of the first probe, two of the second.
    model, _ = counted(cases.build("llama").to(GPU), most=7)
    with pytest.raises(KeyboardInterrupt):
        pruned(model, sparsity=0.5, probes=2, resume_dir=tmp_path)
    again, left = counted(cases.build("llama").to(GPU))
    found = pruned(again, sparsity=0.5, probes=2, resume_dir=tmp_path)
    assert cases.differing(_on_cpu(wanted.masks), _on_cpu(found.masks)) == 0
    assert len(left) <= len(passes) - 4, "the first probe is not made again"


def counted(model, most=None):
    """The model and a list that grows with its passes, of which the one behind the `most`th raises."""
    passes = []

    def note(*_):
        if len(passes) == most:
            raise KeyboardInterrupt
        passes.append(None)

    model.register_forward_pre_hook(note)
    return model, passes


def test_draws_are_the_same_in_every_pass_and_the_callers_are_as_they_were():
    device = torch.device(GPU)
    torch.cuda.manual_seed(7)
    expected = torch.rand(3, device=device)
    torch.cuda.manual_seed(7)
    found = []
    for _ in range(2):
        with own_draws(device) as draw:
            draw(3)
            found.append((torch.rand(3), torch.rand(3, device=device)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(torch.rand(3, device=device), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recovery_keeps_the_zeros(dtype):
    model, masks = half_pruned(dtype=dtype)
    teacher = cases.build("llama", dtype, seed=0)
    rows = cases.batches("llama", rows=8, length=16)
    result = recover_pretrained(
        model.to(GPU),
        teacher.to(GPU),
        RecoveryConfig(steps=4, learning_rate=1e-2),
        text=rows,
        evaluation=False,
        progress=False,
    )
    for name, mask in masks.items():
        weight = result.model.get_parameter(name if name.endswith("weight") else f"{name}.weight")
        assert weight.device == torch.device(GPU)
        assert weight[mask.to(GPU)].eq(0).all(), name


@pytest.mark.parametrize("compiled", [False, True])
def test_training_prunes_there(tmp_path, compiled):
    model = cases.build("llama")
    callback = StatePruningCallback(0.5, begin_step=2, end_step=6)
    options = arguments(tmp_path, use_cpu=False, max_steps=8, torch_compile=compiled)
    trainer = Trainer(model, options, train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    pruned = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    assert {p.device.type for p in pruned} == {torch.device(GPU).type}
    assert sum(int((p == 0).sum()) for p in pruned) == sum(p.numel() for p in pruned) // 2


def test_a_bench_runs_there_and_counts_the_memory_of_the_device(checkpoint):
    found = bench_pretrained([str(checkpoint)] * 2, prompt_length=8, new_tokens=4, repeats=3, progress=False)
    assert found.device == torch.cuda.get_device_name()
    first, second = found.rows
    assert first.peak_memory_bytes == second.peak_memory_bytes
    assert 0 < first.peak_memory_bytes < 1e9
    assert first.prefill_seconds.median > 0


def test_the_demo_runs_there(checkpoint, tmp_path):
    demo = Path(__file__).parent.parent / "examples" / "demo.py"
    command = [sys.executable, demo, "--model", checkpoint, "--output", tmp_path / "out", "--num-samples", "8"]
    command += ["--sequence-length", "32", "--channels", "8", "--repeats", "1"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("The Earth goes around") == 3


def _on_cpu(masks):
    return {name: mask.cpu() for name, mask in masks.items()}
