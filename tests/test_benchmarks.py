"""The benchmarks' own promises: what does not belong in one table is refused."""

from __future__ import annotations

import argparse
import copy
import math

import pytest

from benchmarks.training import Text, check_alike, train

ARGS = argparse.Namespace(steps=20, batch_size=2, learning_rate=1e-3, every=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "text.txt"
    path.write_text("some bytes to learn, again and again. " * 60, encoding="utf-8")
    text = Text(path, 32)
    ways = {None: 0.0, "magnitude": 0.5, "state-fisher": 0.5}
    return [train(ARGS, text, 0, saliency, sparsity) for saliency, sparsity in ways.items()]


def test_runs_of_one_seed_differ_in_the_method_alone(runs):
    check_alike(runs)
    assert all(0 < run["bits_per_byte"] < 8.5 for run in runs)
    assert len({run["bits_per_byte"] for run in runs}) == 3
    again = copy.deepcopy(runs)
    again[2]["conditions"]["tokens"] += 1
    with pytest.raises(ValueError, match="state-fisher, seed 0: tokens is"):
        check_alike(again)


def test_a_run_that_missed_its_sparsity_is_refused(runs):
    again = copy.deepcopy(runs)
    again[1]["zeros"] -= 1
    with pytest.raises(ValueError, match="zeros are not 50%"):
        check_alike(again)


def test_a_seed_that_only_some_methods_have_is_refused(runs):
    again = [*runs, {**runs[0], "seed": 1}]
    with pytest.raises(ValueError, match="some methods have seeds that others lack"):
        check_alike(again)


def test_the_dense_run_learns(runs):
    assert runs[0]["bits_per_byte"] < math.log2(256)
