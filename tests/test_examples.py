"""The examples run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from tests.loopback_hub import TOKEN, running_hub

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script, *arguments, check=True, **environment):
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, env={**os.environ, **environment})


def test_local(checkpoint, text_file, tmp_path):
    ran = run("prune_local.py", checkpoint, text_file, tmp_path / "out")
    assert "self_attn.q_proj" in ran.stdout
    assert inspect_checkpoint(tmp_path / "out").sparsity == pytest.approx(0.4, abs=1e-3)


def test_demo(checkpoint, tmp_path):
    ran = run(
        "demo.py", "--model", checkpoint, "--output", tmp_path / "out", "--num-samples", 8, "--sequence-length", 32
    )
    assert inspect_checkpoint(tmp_path / "out").sparsity == pytest.approx(0.5, abs=1e-4)
    for said in ("perplexity", "50.00", "GB peak memory", "README.md", "The Earth goes around"):
        assert said in ran.stdout


def test_push(checkpoint, tmp_path):
    with running_hub() as hub:
        run(
            "push_to_hub.py",
            checkpoint,
            "me/tiny-24",
            HF_ENDPOINT=hub.url,
            HF_TOKEN=TOKEN,
            HF_HOME=str(tmp_path),
            HF_HUB_OFFLINE="0",
        )
        card = hub.repositories["me/tiny-24"].revisions["main"]["README.md"].decode()
    assert "sparsity-2-4" in card
    assert "every group of 4 inputs, of which 2 are kept" in card


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "accelerate": ["-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "accelerate_processes.yaml"],
    "accelerate, FSDP2": ["-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "accelerate_fsdp2.yaml"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_distributed(launcher, checkpoint, text_file, tmp_path):
    command = [*LAUNCHERS[launcher], EXAMPLES / "prune_distributed.py", checkpoint, tmp_path / "out", text_file]
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    placed = "sharded by FSDP2" if "FSDP2" in launcher else "in memory"
    assert ran.stdout.count(f"50.00% zeros, 2 processes, {placed}") == 1
    assert inspect_checkpoint(tmp_path / "out").sparsity == pytest.approx(0.5, abs=1e-4)
    assert not (tmp_path / "out-state").exists()


def test_each_says_how_it_is_used():
    for script in EXAMPLES.glob("*.py"):
        ran = run(script.name, check=False)
        assert ran.returncode != 0
        assert "usage" in ran.stderr


def test_recover(checkpoint, text_file, other_text_file, tmp_path):
    ran = run(
        "recover.py",
        *("--model", checkpoint, "--text", text_file, "--evaluation", other_text_file, "--sparsity", 0.5),
        *("--steps", 20, "--sequence-length", 32, "--num-samples", 8, "--evaluation-samples", 8),
        *("--learning-rate", 1e-2, "--json", tmp_path / "figures.json", "--output", tmp_path / "out"),
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["perplexity"]["recovered"] < figures["perplexity"]["pruned"]
    assert inspect_checkpoint(tmp_path / "out").sparsity == pytest.approx(0.5, abs=1e-3) == figures["sparsity"]
    assert "50.0000%" in ran.stdout
