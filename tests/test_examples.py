"""The examples run as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands import launch
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.readme_table import faces_table
from examples import chat_adapter, demo, recover
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from tests import scripts
from tests.grids import some
from tests.loopback_hub import TOKEN

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script, *arguments):
    ran = scripts.run(EXAMPLES / script, *arguments)
    assert ran.returncode == 0, ran.stderr
    return ran


def test_local(checkpoint, text_file, tmp_path):
    ran = run("prune_local.py", checkpoint, text_file, tmp_path / "out")
    assert "self_attn.q_proj" in ran.stdout
    assert inspect_checkpoint(tmp_path / "out").sparsity == pytest.approx(0.4, abs=1e-3)


@pytest.mark.parametrize("repeats", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_demo(repeats, checkpoint, tmp_path):
    ran = run(
        *("demo.py", "--model", checkpoint, "--output", tmp_path / "out", "--num-samples", 8),
        *("--sequence-length", 32, "--channels", 8, "--repeats", repeats, "--json", tmp_path / "demo.json"),
    )
    assert inspect_checkpoint(tmp_path / "out").sparsity == pytest.approx(0.5, abs=1e-4)
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "out-smaller").num_parameters()
    assert smaller < AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters()
    for said in ("perplexity", "50.00", f"{smaller:,}", "GB peak memory", "README.md", "The Earth goes around"):
        assert said in ran.stdout
    assert ("tokens per second" in ran.stdout) == bool(repeats)
    card = (tmp_path / "out-smaller" / "README.md").read_text()
    assert ("not measured" in card) == (not repeats)
    found = json.loads((tmp_path / "demo.json").read_text())
    assert [row["parameters"] for row in found["rows"]][1:] == [found["rows"][0]["parameters"], smaller]
    assert repeats == 0 or "| smaller |" in faces_table(found)


@pytest.mark.slow
def test_a_vision_model_to_prune(tmp_path):
    run("vit_shapes.py", tmp_path / "shapes", "--images", 40, "--steps", 2)
    result = prune_pretrained(
        tmp_path / "shapes" / "model",
        GradProbeConfig(num_samples=16),
        calibration=tmp_path / "shapes" / "train.parquet",
        evaluation=tmp_path / "shapes" / "test.parquet",
        progress=False,
    )
    assert result.report.evaluation["metric"]["name"] == "accuracy"
    assert result.report.evaluation["samples"] == 10


@pytest.mark.slow
def test_push(hub, user, checkpoint):
    ran = user.run(EXAMPLES / "push_to_hub.py", checkpoint, "me/tiny-24", environment={"HF_TOKEN": TOKEN})
    assert ran.returncode == 0, ran.stderr
    card = hub.repositories["me/tiny-24"].revisions["main"]["README.md"].decode()
    assert "sparsity-2-4" in card
    assert "every group of 4 inputs, of which 2 are kept" in card


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "accelerate": ["-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "accelerate_processes.yaml"],
    "accelerate, FSDP2": ["-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "accelerate_fsdp2.yaml"],
}


def port():
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def check_distributed(launcher, output, printed):
    placed = "sharded by FSDP2" if "FSDP2" in launcher else "in memory"
    assert printed.count(f"50.00% zeros, 2 processes, {placed}") == 1
    assert inspect_checkpoint(output).sparsity == pytest.approx(0.5, abs=1e-4)
    assert not Path(f"{output}-state").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_distributed(launcher, checkpoint, text_file, tmp_path):
    command = [*LAUNCHERS[launcher], EXAMPLES / "prune_distributed.py", checkpoint, tmp_path / "out", text_file]
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MASTER_PORT": port()},
    )
    assert ran.returncode == 0, ran.stderr
    check_distributed(launcher, tmp_path / "out", ran.stdout)


def variables(launcher):
    """Those that a launcher would set, by its own account, without those of a single process."""
    if launcher == "torchrun":
        return {}
    parser = launch.launch_command_parser()
    args, *_ = launch._validate_launch_command(parser.parse_args([*map(str, LAUNCHERS[launcher][2:]), "script.py"]))
    assert args.num_processes == 2
    return prepare_multi_gpu_env(args)


@some("launcher", LAUNCHERS, fast=("torchrun", "accelerate, FSDP2"))
def test_what_a_launcher_starts_joins_by_itself(launcher, checkpoint, text_file, tmp_path):
    """Two forks with a launcher's variables, in place of the launcher: it would import everything three times."""
    common = {**variables(launcher), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
    started = [
        scripts.start(
            EXAMPLES / "prune_distributed.py",
            *(checkpoint, tmp_path / "out", text_file),
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    ran = [one.wait() for one in started]
    for one in ran:
        assert one.returncode == 0, one.stderr
    check_distributed(launcher, tmp_path / "out", "".join(one.stdout for one in ran))


def test_so_does_what_accelerate_starts_by_mpirun(checkpoint, text_file, tmp_path):
    """Each process would do the whole run by itself, and write the same folder."""
    started = [
        scripts.start(
            EXAMPLES / "prune_distributed.py",
            *(checkpoint, tmp_path / "out", text_file),
            environment=common | {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")},
        )
        for common in [{"OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}]
        for rank in range(2)
    ]
    ran = [one.wait() for one in started]
    for one in ran:
        assert one.returncode == 0, one.stderr
    check_distributed("torchrun", tmp_path / "out", "".join(one.stdout for one in ran))


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_each_says_how_it_is_used(script):
    ran = scripts.run(EXAMPLES / script, "--help")
    assert "usage" in ran.stdout + ran.stderr


def test_recover(checkpoint, text_file, other_text_file, tmp_path):
    ran = run(
        "recover.py",
        *("--model", checkpoint, "--split", text_file, "--evaluation", f"other={other_text_file}", "--sparsity", 0.5),
        *("--steps", 20, "--sequence-length", 32, "--num-samples", 8, "--evaluation-samples", 8),
        *("--learning-rates", 5e-3, 5.0, "--json", tmp_path / "figures.json", "--pruned", tmp_path / "pruned"),
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    kl = {name: row["texts"]["plain"]["kl"] for name, row in figures["rows"].items()}
    assert kl["dense"] == 0 < kl["recovered"] < kl["pruned"]
    assert set(figures["rows"]["dense"]["texts"]) == {"plain", "other"}
    assert figures["learning_rate"] == 5e-3
    assert inspect_checkpoint(tmp_path / "pruned").sparsity == pytest.approx(0.5, abs=1e-3) == figures["sparsity"]
    assert "50.0000%" in ran.stdout


@pytest.mark.parametrize("template", ["right behind", "thinks first"])
def test_answers_are_compared_where_the_model_was_taught_to_write_them(checkpoint, template):
    words = AutoTokenizer.from_pretrained(checkpoint)
    said = "{{ m['content'] }}" if template == "right behind" else "{{ '<think></think>' + m['content'] }}"
    words.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}"
        + said
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    if template == "thinks first":
        with pytest.raises(SystemExit, match="does not put the answer right behind the question"):
            chat_adapter.answers_of(words)
        return
    rows = chat_adapter.rows_of(words, [("It is good.", 0), ("It is good.", 1)])
    taught = [next(label for label in row["labels"] if label != -100) for row in rows]
    assert chat_adapter.answers_of(words) == taught


def test_what_is_there_of_another_run_is_neither_replaced_nor_shown_as_this_one(checkpoint, tmp_path, monkeypatch):
    """Called here, where a process of its own would import for seconds what it does not come to."""

    def ends_with(said, script, *arguments):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        with pytest.raises(SystemExit, match=said):
            script.main()

    for script in (chat_adapter, demo, recover):
        for work in ("prune_pretrained", "load_batches", "trained", "load_model"):
            monkeypatch.setattr(script, work, lambda *_, **__: pytest.fail("it works"), raising=False)
    shutil.copytree(checkpoint, tmp_path / "out-dense")
    ends_with("out-dense exists already", demo, "--model", checkpoint, "--output", tmp_path / "out")

    known = {"model": checkpoint.name, "steps": 60, "rows": {}, "rates": {}}
    (tmp_path / "figures.json").write_text(json.dumps(known))
    text = ["--text", "pydoc", "--evaluation", "other=pydoc", "--json", tmp_path / "figures.json"]
    ends_with("has rows of steps 60", recover, "--model", checkpoint, *text, "--steps", 4)
    config = GradProbeConfig(score="magnitude")
    prune_pretrained(str(checkpoint), config, evaluation=False, progress=False, output_dir=tmp_path / "pruned")
    pruned = [*text, "--steps", 60, "--pruned", tmp_path / "pruned"]
    ends_with(r"pruned is .*tiny-llama at a sparsity of 50\.00%", recover, "--model", checkpoint, *pruned)

    ends_with("2", recover, "--model", checkpoint, *text[:2], *text[4:])  # nothing to measure on; argparse's own

    (tmp_path / "chats" / "adapter").mkdir(parents=True)
    (tmp_path / "chats" / "adapter" / "settings.json").write_text('{"model": "other", "steps": 75, "train": 600}')
    for part in ("train", "test"):
        (tmp_path / f"{part}.tsv").write_text("It is good.\t1\n")
    for asked in ("rows_of", "answers_of"):  # of a chat template
        monkeypatch.setattr(chat_adapter, asked, lambda *_: [])
    ends_with(
        "adapter of .*other", chat_adapter, "--model", checkpoint, "--output", tmp_path / "chats", "--data", tmp_path
    )


def test_the_notebook(checkpoint, monkeypatch, pictures):
    """Its cells, one after the other; what a notebook does beside that is Jupyter's."""
    for name, value in {"MODEL": checkpoint, "SAMPLES": 8, "LENGTH": 32}.items():
        monkeypatch.setenv(name, str(value))
    cells = json.loads((EXAMPLES / "prune.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["zeros"] == names["report"].zeros == inspect_checkpoint(names["folder"]).zeros


@pytest.mark.slow
def test_a_classifier(checkpoint, other_text_file, tmp_path):
    lines = [
        f"a {word} film, number {number}\t{label}\n"
        for number in range(12)
        for label, word in enumerate(("bad", "good"))
    ]
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
    figures = tmp_path / "figures.json"
    few = ["--blocks", 1, "--sentences", 8, "--num-samples", 8, "--sparsity", 0.5, "--max-metric-drop", "10%"]
    run("classifier.py", "--model", checkpoint, "--data", tmp_path, "--text", other_text_file, "--json", figures, *few)
    dense, *pruned, searched = json.loads(figures.read_text())["rows"]
    assert (dense["sparsity"], searched["method"]) == (0, "one probe, --max-metric-drop 10%")
    assert [row["calibration"] for row in pruned] == [
        "its labelled sentences",
        "its sentences",
        f"other text ({other_text_file})",
    ]
    assert all(row["sparsity"] == pytest.approx(0.5, abs=1e-3) for row in pruned)
    assert all(0 <= row["accuracy"] <= 1 for row in (dense, *pruned, searched))
