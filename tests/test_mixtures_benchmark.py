"""The benchmark of calibration texts and mixtures: what it makes, keeps and shows."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import mixtures
from benchmarks.mixtures_table import mixtures_table


def row(text, preset, *perplexities):
    return {"text": text, "preset": preset, "sparsity": 0.5, "perplexity": dict(zip("ab", perplexities, strict=True))}


def test_the_table_begins_with_the_lowest_mean_ratio_and_marks_the_best_of_each_text():
    results = {
        "settings": {"model": "m", "dtype": "float32", "calibration": "4 x 8", "evaluation": {"a": {"text": "2 x 8"}}},
        "dense": {"a": 10.0, "b": 20.0},
        "rows": [
            row("own", "fast", 20.0, 80.0),
            row("own + pydoc", "fast", 30.0, 40.0),
            row("own", "best", 10.0, 20.0),
        ],
    }
    lines = mixtures_table(results).splitlines()[3:6]
    assert lines == [
        "| 50%, `fast` | own text + pydoc | 30.00 | **40.00** | **2.45** |",
        "| 50%, `fast` | the model's own text | **20.00** | 80.00 | 2.83 |",
        "| 50%, `best` | the model's own text | **10.00** | **20.00** | **1.00** |",
    ]


@pytest.mark.slow
def test_it_writes_own_text_once_and_makes_only_what_is_missing(
    checkpoint, text_file, other_text_file, tmp_path, monkeypatch
):
    output, work = tmp_path / "mixtures.json", tmp_path / "work"
    documents = tmp_path / "documents.txt"
    documents.write_text("\n\n".join(f"document {i}: {'some words ' * 20}" for i in range(10)), encoding="utf-8")

    def run(*texts):
        words = ["--model", checkpoint, "--wikitext", text_file, other_text_file, "--c4", documents, "--work", work]
        words += ["--output", output, "--presets", "fast", "--num-samples", 4, "--sequence-length", 16]
        words += ["--evaluation-samples", 2, "--dtype", "float32", "--texts", *texts]
        monkeypatch.setattr(sys, "argv", ["mixtures.py", *map(str, words)])
        mixtures.main()
        return json.loads(output.read_text())["rows"]

    (first,) = run("own + C4")
    assert set(first["perplexity"]) == {"WikiText-2", "C4", "pydoc"}
    monkeypatch.setattr("gradprobe_hf.data.windows.own_text", lambda *args, **options: 1 / 0)
    found = run("own + C4", "own + pydoc")
    assert found[0] == first
    assert found[1]["perplexity"] != first["perplexity"]
    assert sorted(path.name for path in work.iterdir()) == [
        "c4-calibration.txt",
        "c4-evaluation.txt",
        "own-2.safetensors",
    ]
