"""What the end of a run says about other presets is what the benchmark has measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.quality_tables import PRESETS
from gradprobe_hf import GradProbeConfig
from gradprobe_hf.report.next_choice import PRICES, PRICES_IN_GROUPS, RATIO, SECONDS, STEPS, next_choices

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TRAINING = "better: train the kept weights, as examples/recover.py does"


@pytest.mark.parametrize(("prices", "column"), [(PRICES, "0.6"), (PRICES_IN_GROUPS, "2:4")])
def test_prices_are_those_of_the_benchmark(prices, column):
    rows = {
        (row["method"], row["column"]): row
        for row in json.loads((RESULTS / "wikitext.json").read_text(encoding="utf-8"))["rows"]
    }
    assert list(prices) == list(PRESETS)
    for preset, price in prices.items():
        row = rows[PRESETS[preset][":" in column], column]
        assert price.seconds == pytest.approx(row["seconds"], abs=0.06)
        assert price.perplexity == pytest.approx(math.prod(row["perplexity"].values()) ** 0.5, abs=0.006)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, [TRAINING, "faster: preset fast"]),
        ({"preset": "balanced"}, ["better: preset best", "faster: preset fast"]),
        ({"probes": 1}, ["better: preset best"]),
        ({"pattern": "2:4"}, [TRAINING, "faster: preset balanced"]),
        ({"pattern": "2:4", "preset": "fast"}, ["better: preset best"]),
        ({"score": "wanda"}, []),
        ({"order": "sequential"}, []),
    ],
    ids=str,
)
def test_a_preset_names_the_next_ones(options, named):
    said = next_choices(GradProbeConfig(**options))
    assert [one.split(" (")[0] for one in said] == named


def test_what_trains_a_language_model_is_not_recommended_for_others():
    assert [one.split(" (")[0] for one in next_choices(GradProbeConfig(), False)] == ["faster: preset fast"]


def test_the_price_is_in_the_sentence():
    assert next_choices(GradProbeConfig())[1:] == [
        "faster: preset fast (0.38x the time, 1.55x the perplexity on SmolLM2-135M-Instruct at 60%)"
    ]


def test_training_has_its_measured_price_too():
    found = json.loads((RESULTS / "recovery.json").read_text(encoding="utf-8"))
    assert (found["model"], found["sparsity"]) == ("smollm2-135m-instruct", 0.6)
    assert (found["steps"], found["seconds"]) == (STEPS, SECONDS)
    ratio = found["perplexity"]["recovered"] / found["perplexity"]["pruned"]
    assert ratio == pytest.approx(RATIO, abs=0.006)
