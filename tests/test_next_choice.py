"""What the end of a run says about other presets is what the benchmark has measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.quality_tables import PRESETS
from gradprobe_hf import GradProbeConfig
from gradprobe_hf.report.next_choice import BEYOND, BEYOND_IN_GROUPS, PRICES, PRICES_IN_GROUPS, next_choices

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TRAINING = ["better: recovery_steps=100", "better: refinement='blocks'"]
ROWS = {"recovery_steps=100": "one probe + admm + recovery", "refinement='blocks'": "one probe + admm + blocks"}


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
        ({}, [*TRAINING, "faster: preset balanced"]),
        ({"preset": "balanced"}, ["better: preset best", "faster: preset fast"]),
        ({"probes": 1}, ["better: preset best"]),
        ({"pattern": "2:4"}, [*TRAINING, "faster: preset balanced"]),
        ({"refinement": "blocks"}, []),
        ({"recovery_steps": 10}, []),
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
    (said,) = next_choices(GradProbeConfig(), False)
    assert said.startswith("faster: preset balanced (0.")
    assert "perplexity" not in said
    assert next_choices(GradProbeConfig(preset="fast"), False) == []


def test_the_price_is_in_the_sentence():
    assert next_choices(GradProbeConfig())[2:] == [
        "faster: preset balanced (0.71x the time, 1.41x the perplexity on SmolLM2-135M-Instruct at 60%)"
    ]


@pytest.mark.parametrize(("prices", "column"), [(BEYOND, "0.6"), (BEYOND_IN_GROUPS, "2:4")])
def test_training_has_its_measured_price_too(prices, column):
    found = json.loads((RESULTS / "refined.json").read_text(encoding="utf-8"))
    assert found["settings"]["model"] == "smollm2-135m-instruct"
    rows = [row for row in found["rows"] if row["column"] == column]
    mean = {row["method"]: math.prod(row["perplexity"].values()) ** 0.5 for row in rows}
    assert list(prices) == list(ROWS)
    for option, ratio in prices.items():
        assert ratio == pytest.approx(mean[ROWS[option]] / mean["one probe + admm"], abs=0.006)
