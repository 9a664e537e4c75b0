"""The command, as a subprocess: exact spellings, clean standard output, exit codes, and what is left after Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.cli.main import main, parser
from gradprobe_hf.cli.options import configuration
from gradprobe_hf.model import loading
from gradprobe_hf.report.build import versions

GRADPROBE = [sys.executable, "-m", "gradprobe_hf"]
SMALL = ["--num-samples", "4", "--sequence-length", "16", "--evaluation-samples", "4"]


def gradprobe(*arguments, **options):
    return subprocess.run([*GRADPROBE, *map(str, arguments)], capture_output=True, text=True, check=False, **options)


def test_prune_inspect_evaluate(checkpoint, text_file, tmp_path):
    out = tmp_path / "out"
    ran = gradprobe(
        "prune",
        checkpoint,
        "--output",
        out,
        "--sparsity",
        0.6,
        "--calibration",
        text_file,
        "--evaluation",
        "pydoc",
        *SMALL,
    )
    assert ran.returncode == 0, ran.stderr
    assert "60.00" in ran.stdout
    assert "perplexity" in ran.stdout
    assert "probe 0" in ran.stderr  # progress goes to standard error
    assert "probe 0 (original" not in ran.stdout
    seen = gradprobe("inspect", out)
    assert "60.00" in seen.stdout
    assert "model.layers.2" in seen.stdout
    assert "n:m patterns that hold in every matrix: none" in seen.stdout
    found = gradprobe("evaluate", out, "--data", "pydoc", "--num-samples", 4, "--sequence-length", 16, "--json")
    report = json.loads((out / "gradprobe_report.json").read_text())
    assert json.loads(found.stdout)["perplexity"] == pytest.approx(
        report["evaluation"]["pruned"]["perplexity"], rel=1e-6
    )


def test_prune_from_disk_with_everything_small(checkpoint, tmp_path):
    """The flags have the names of the arguments, and the result is that of a run in memory."""
    common = ["prune", checkpoint, "--sparsity", 0.5, "--evaluation", "none", "--json", *SMALL]
    memory = gradprobe(*common, "--output", tmp_path / "memory", "--batch-size", "auto")
    flags = ["--device-map", "disk", "--offload-folder", tmp_path / "off", "--accumulator-device", "disk"]
    flags += ["--checkpointing", "on", "--resume-dir", tmp_path / "state", "--save-every", 1]
    disk = gradprobe(*common, "--output", tmp_path / "disk", *flags)
    assert memory.returncode == disk.returncode == 0, disk.stderr
    first, second = json.loads(memory.stdout), json.loads(disk.stdout)
    assert second["execution"]["placement"] == "offloaded by Accelerate"
    assert second["execution"]["checkpointing"] == "on, as asked"
    assert "tried" in first["execution"]["batch_size"]
    assert [row["zeros_after"] for row in first["matrices"]] == [row["zeros_after"] for row in second["matrices"]]
    assert not (tmp_path / "state").exists()
    assert not [path for path in (tmp_path / "off").rglob("*") if path.is_file()], "nothing is left in the folder"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device-map", '{"model.layerz": "disk"}'], "no such module"),
        (["--checkpointing", "maybe"], "is not 'on', 'off' or 'auto'"),
        (["--max-memory", "8GiB"], "is not a JSON object"),
        (["--save-every", "0"], "save_every must be a whole number"),
        (["--accumulator-dtype", "fp8"], "invalid choice"),
    ],
)
def test_what_is_wrong_about_memory_is_said_in_one_line(flags, said, checkpoint, tmp_path, capsys):
    with contextlib.suppress(SystemExit):  # what argparse refuses
        assert main(["prune", str(checkpoint), "--output", str(tmp_path / "out"), *SMALL, *flags]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_json_is_the_whole_of_standard_output(checkpoint, tmp_path):
    ran = gradprobe("prune", checkpoint, "--output", tmp_path / "out", "--pattern", "2:4", "--json", *SMALL)
    assert json.loads(ran.stdout)["sparsity"] == 0.5
    seen = gradprobe("inspect", tmp_path / "out", "--json")
    assert json.loads(seen.stdout)["patterns"] == ["2:4", "4:8"]
    assert len(json.loads(seen.stdout)["matrices"]) == 21
    quiet = gradprobe("prune", checkpoint, "--output", tmp_path / "b", "--quiet", "--json", *SMALL)
    assert json.loads(quiet.stdout)["output"] == str(tmp_path / "b")
    assert quiet.stderr == ""


def test_every_option_has_the_spelling_that_was_promised():
    line = (
        "prune m --output o --sparsity 0.5 --strategy fisher --decision path --scope global --fisher blend "
        "--gradient-threshold 0.0 --reduction-factor 0.1 --calibration c --num-samples 128 --sequence-length 512 "
        "--batch-size 2 --dtype bfloat16 --include a --include b --exclude c --evaluation e --evaluation-samples 3 "
        "--seed 0 --config f --push-to-hub r --private --overwrite --quiet --json --pattern 2:4"
    )
    options = parser().parse_args(line.split())
    assert options.include == ["a", "b"]
    for flag, choices in {
        "--strategy": ["fisher", "wanda", "magnitude", "random"],
        "--decision": ["path", "threshold", "none"],
        "--scope": ["global", "block", "tensor", "row"],
        "--fisher": ["blend", "sequence", "token", "factored"],
    }.items():
        for choice in choices:
            parser().parse_args(["prune", "m", "--output", "o", flag, choice])


def test_a_file_of_options_and_the_command_line_over_it(checkpoint, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("sparsity: 0.3\nstrategy: magnitude\ndecision: none\ninclude: [q_proj]\n")
    main(
        [
            "prune",
            str(checkpoint),
            "--output",
            str(tmp_path / "out"),
            "--config",
            str(tmp_path / "recipe.yaml"),
            "--sparsity",
            "0.25",
            "--evaluation",
            "none",
            "--json",
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert report["sparsity"] == 0.25
    assert {row["role"] for row in report["matrices"]} == {"self_attn.q_proj"}
    assert report["calibration"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "1.5"], "sparsity must be a fraction in [0, 1)"),
        (["--sparsity", "0.6", "--pattern", "2:4"], "contradicts pattern='2:4'"),
        (["--pattern", "2:64"], "not divisible by 64"),
        (["--include", "nothing"], "matches no prunable module"),
        (["--calibration", "no/such/file.txt"], "no such file or folder"),
        (["--sequence-length", "4096"], "max_position_embeddings"),
        (["--num-samples", "99999"], "full windows"),
        (["--config", "/no/recipe.yaml"], "/no/recipe.yaml"),
        (["--dtype", "int7"], "int7"),
    ],
)
def test_wrong_input_is_one_readable_line(arguments, message, checkpoint, tmp_path, capsys):
    assert main(["prune", str(checkpoint), "--output", str(tmp_path / "out"), *SMALL, *arguments]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--rounds", "0.2;0.5", "'0.2;0.5' is not a list of fractions"),
        ("--max-metric-drop", "five", "'five' is not a number, or a share like 5%"),
        ("--gradient-threshold", "much", "'much' is not a number, 'adaptive', or a JSON object"),
        ("--batch-size", "many", "'many' is not a whole number or 'auto'"),
    ],
)
def test_an_argument_that_cannot_be_read_is_named_with_what_it_should_be(flag, value, said, capsys):
    with pytest.raises(SystemExit):
        main(["prune", "model", "--output", "out", flag, value])
    assert said in capsys.readouterr().err


def test_a_preset_wins_over_what_another_came_to_in_a_file(tmp_path):
    GradProbeConfig(preset="balanced", num_samples=7).to_yaml(tmp_path / "balanced.yaml")
    command = ["prune", "model", "--output", "out", "--config", str(tmp_path / "balanced.yaml")]
    found = configuration(parser().parse_args([*command, "--preset", "best", "--dense-target", "0.5"]))
    assert (found.decision, found.reconstruction, found.dense_target) == ("none", "admm", 0.5)
    assert found.num_samples == 7
    assert configuration(parser().parse_args(command)).decision == "path"


def test_an_unknown_model_is_one_readable_line(tmp_path):
    ran = gradprobe("prune", "nobody/no-such-model", "--output", tmp_path / "out")
    assert ran.returncode == 1
    assert "nobody/no-such-model" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert main(["inspect", str(tmp_path)]) == 1


@pytest.mark.parametrize("stage", ["read data ...", "probe 0 ...", "probe 1 ...", "evaluate dense ...", "save ..."])
def test_ctrl_c_leaves_nothing_behind(stage, checkpoint, tmp_path):
    """A real SIGINT, sent as soon as the stage is announced."""
    command = [
        *GRADPROBE,
        "prune",
        str(checkpoint),
        "--output",
        str(tmp_path / "out"),
        "--num-samples",
        "60",
        "--sequence-length",
        "16",
        "--batch-size",
        "1",
        "--evaluation-samples",
        "60",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a suite run in the background of a script inherits that SIGINT is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    announced = False
    for line in process.stderr:
        if line.startswith(stage):
            announced = True
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert announced, rest
    assert process.wait(timeout=60) == 130
    assert "interrupted; no unfinished checkpoint" in rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def installed(script):
    path = Path(sys.executable).parent / script
    if not path.exists():
        pytest.skip("the package is not installed here")
    return str(path)


def test_the_entry_points_start():
    for script in ("gradprobe", "hf-gradprobe"):
        ran = subprocess.run([installed(script), "--help"], capture_output=True, text=True, check=False)
        assert "prune" in ran.stdout


def test_which_model_it_is_reaches_the_loader(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda name, **source: seen.update(source) or 1 / 0)
    for verb in (
        ["prune", "--output", str(tmp_path / "out")],
        ["compare"],
        ["evaluate", "--data", "pydoc"],
        ["estimate"],
    ):
        seen.clear()
        with pytest.raises(ZeroDivisionError):
            main([verb[0], "someone/model", *verb[1:], "--revision", "v2", "--trust-remote-code"])
        assert seen == {"revision": "v2", "trust_remote_code": True}, verb


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"gradprobe_hf {versions()['gradprobe_hf']}\n"


def test_hf_gradprobe_is_the_same_command(checkpoint, tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    registered = subprocess.run(
        [installed("hf-gradprobe"), "--register"], env=environment, capture_output=True, check=False
    )
    assert registered.returncode == 0, registered.stderr
    command = [installed("hf"), "gradprobe", "inspect", str(checkpoint), "--json"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["zeros"] == 0
