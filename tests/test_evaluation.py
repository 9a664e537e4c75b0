"""Perplexity: the bundled measurement, offline, against a loop over tokens and against the independent scorer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import evaluate
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradprobe_hf.data.windows import TextOptions, WindowSpec, load_batches
from gradprobe_hf.evaluation import metrics, perplexity
from gradprobe_hf.evaluation.perplexity import measure
from tests import cases

SHARED = Path(__file__).parent.parent.parent / "shared"


def test_perplexity_is_exp_of_the_mean_token_loss():
    model = cases.build("llama", torch.float64)
    windows = torch.cat([batch["input_ids"] for batch in cases.batches("llama")])
    total, tokens = 0.0, 0
    for window in windows:
        with torch.no_grad():
            probabilities = model(input_ids=window[None]).logits[0].softmax(-1)
        for position in range(len(window) - 1):
            total -= math.log(probabilities[position, window[position + 1]])
            tokens += 1
    found = measure(cases.workload(model, cases.batches("llama")))
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-9)
    assert found.terms == tokens
    assert measure(cases.workload(model, cases.batches("llama", batch_size=3))).loss == pytest.approx(
        found.loss, rel=1e-12
    )
    measurement = evaluate.load(metrics.path("perplexity"))
    assert measurement.compute(input_ids=windows.tolist(), model=model)["perplexity"] == pytest.approx(found.perplexity)


def test_the_measurement_begins_windows_as_the_tokenizer_begins_a_text():
    model, tokenizer = cases.build("llama", torch.float64), cases.tokenizer("<s> $A")
    bare = torch.cat([batch["input_ids"] for batch in cases.batches("llama")])
    begun = torch.cat([torch.full((len(bare), 1), 256), bare], dim=1)
    wanted = measure(cases.workload(model, [{"input_ids": begun}]))
    measurement = evaluate.load(metrics.path("perplexity"))
    for windows in (bare, begun):  # what begins so already gets no second one
        found = measurement.compute(input_ids=windows.tolist(), model=model, processing_class=tokenizer)
        assert found["perplexity"] == pytest.approx(wanted.perplexity)
        assert found["tokens"] == wanted.terms == bare.numel()
    plain = measurement.compute(
        input_ids=bare.tolist(), model=model, processing_class=tokenizer, add_special_tokens=False
    )
    assert plain["tokens"] == bare.numel() - len(bare)


def test_models_with_other_losses_have_no_perplexity():
    for name in ("bert", "vit", "t5"):
        found = measure(cases.workload(cases.build(name), cases.batches(name)))
        assert found.perplexity is None
        assert math.isfinite(found.loss)
    assert measure(cases.workload(cases.build("vit"), cases.batches("vit"))).terms == 6


def test_an_infinite_loss_of_the_pruned_model_is_reported_not_raised():
    model, batches = cases.build("llama"), cases.batches("llama")
    found = measure(cases.workload(model, batches, loss_fn=lambda model, batch: torch.tensor(torch.inf)))
    assert found.loss == math.inf
    assert perplexity.exp(1e6) == math.inf


def test_an_unknown_measurement_is_refused():
    with pytest.raises(ValueError, match="there is 'perplexity'"):
        metrics.path("bleu")


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "tools" / "score.py").exists(), reason="the independent scorer is not beside this checkout"
)
def test_it_agrees_with_the_independent_scorer():
    model_dir, text = SHARED / "models" / "stories15M", SHARED / "data" / "tinystories.txt"
    command = [
        sys.executable,
        SHARED / "tools" / "score.py",
        model_dir,
        "--windows",
        "8",
        "--length",
        "128",
        "--text",
        text,
        "--dtype",
        "float32",
    ]
    wanted = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    batches = load_batches(
        str(text),
        WindowSpec(8, 128, 4, text=TextOptions(add_special_tokens=False)),  # as the scorer
        part="evaluation",
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    windows = torch.cat([batch["input_ids"] for batch in batches])
    found = evaluate.load(metrics.path("perplexity")).compute(
        input_ids=windows.tolist(), model=model, add_special_tokens=False
    )
    # The scorer adds the losses of a batch in float32, which is 1e-5 from the sum in float64 on some CPUs.
    assert found["perplexity"] == pytest.approx(wanted["perplexity"], rel=5e-5)
    assert found["tokens"] == wanted["tokens"]
