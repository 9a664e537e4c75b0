"""The command: exact spellings, clean standard output, exit codes, and what is left after Ctrl-C.

Most cases call `main` in this interpreter; what only a process of its own shows is shown by few of them.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import gradprobe_hf
from gradprobe_hf import GradProbeConfig, RecoveryConfig
from gradprobe_hf.cli.config_options import HEADINGS, configuration, help_of
from gradprobe_hf.cli.main import VERBS, main, parser, read
from gradprobe_hf.cli.options import OPTIONS
from gradprobe_hf.data.text.text_options import TEXT_OPTIONS
from gradprobe_hf.model.loading import load as loading
from gradprobe_hf.report.build import versions
from gradprobe_hf.scores.table import SCORES
from gradprobe_hf.updates.table import UPDATES
from tests.grids import some

GRADPROBE = [sys.executable, "-m", "gradprobe_hf"]
SMALL = ["--num-samples", "4", "--sequence-length", "16", "--evaluation-samples", "4"]
PRUNE = ["prune", "model", "--output", "out"]


@pytest.fixture
def gradprobe(capsys):
    """Runs the command here: exit code, standard output, standard error."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's own
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def configured(*arguments):
    return configuration(read([*PRUNE, *map(str, arguments)]))


def test_prune_inspect_evaluate(checkpoint, text_file, tmp_path, gradprobe):
    out = tmp_path / "out"
    texts = ["--calibration", text_file, "--evaluation", "pydoc"]
    code, said, progress = gradprobe("prune", checkpoint, "--output", out, "--sparsity", 0.6, *texts, *SMALL)
    assert code == 0, progress
    assert "60.00" in said
    assert "perplexity" in said
    assert "probe 0" in progress  # which goes to standard error
    assert "probe 0 (original" not in said
    _, seen, _ = gradprobe("inspect", out)
    assert "60.00" in seen
    assert "model.layers.2" in seen
    assert "n:m patterns that hold in every matrix of these: none" in seen
    data = ["--data", "pydoc", "--num-samples", 4, "--sequence-length", 16]
    _, found, _ = gradprobe("evaluate", out, *data, "--json")
    report = json.loads((out / "gradprobe_report.json").read_text())
    assert json.loads(found)["perplexity"] == pytest.approx(report["evaluation"]["pruned"]["perplexity"], rel=1e-6)
    _, shown, _ = gradprobe("evaluate", out, *data)
    assert f"{json.loads(found)['perplexity']:,.4f}" in shown


def test_a_name_that_a_pipe_has_no_letters_for_fails_nothing(checkpoint, tmp_path, monkeypatch):
    """On Windows a pipe has the letters of one language."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    folder = shutil.copytree(checkpoint, tmp_path / "\u6587")
    assert main(["inspect", str(folder)]) == 0
    out.flush()
    assert rb"\u6587: 0 of" in out.buffer.getvalue()


def test_prune_from_disk_with_everything_small(checkpoint, tmp_path, gradprobe):
    """The flags have the names of the arguments, and the result is that of a run in memory."""
    texts = ["--calibration", "pydoc", "--evaluation", "none"]
    common = ["prune", checkpoint, "--sparsity", 0.5, "--json", *texts, *SMALL[:4]]
    _, memory, _ = gradprobe(*common, "--output", tmp_path / "memory", "--batch-size", "auto")
    flags = ["--device-map", "disk", "--offload-folder", tmp_path / "off", "--accumulator-device", "disk"]
    flags += ["--checkpointing", "on", "--resume-dir", tmp_path / "state", "--save-every", 1]
    _, disk, _ = gradprobe(*common, "--output", tmp_path / "disk", *flags)
    first, second = json.loads(memory), json.loads(disk)
    assert second["execution"]["placement"] == "offloaded by Accelerate"
    assert second["execution"]["checkpointing"] == "on, as asked"
    assert any(words in first["execution"]["batch_size"] for words in ("passes of 1", "by estimate"))
    assert [row["zeros_after"] for row in first["matrices"]] == [row["zeros_after"] for row in second["matrices"]]
    assert not (tmp_path / "state").exists()
    assert not [path for path in (tmp_path / "off").rglob("*") if path.is_file()], "nothing is left in the folder"


def test_json_is_the_whole_of_standard_output(checkpoint, tmp_path, gradprobe):
    _, said, _ = gradprobe("prune", checkpoint, "--output", tmp_path / "out", "--pattern", "2:4", "--json", *SMALL)
    assert json.loads(said)["sparsity"] == 0.5
    _, seen, _ = gradprobe("inspect", tmp_path / "out", "--json")
    assert json.loads(seen)["patterns"] == ["2:4", "4:8"]
    assert len(json.loads(seen)["matrices"]) == 21


@pytest.mark.parametrize("verb", ["estimate", "inspect", "bench"])
def test_of_several_processes_the_first_prints(verb, checkpoint, gradprobe, monkeypatch):
    """Those that a launcher has started share no work of these, and each would print an object of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert gradprobe(verb, str(checkpoint), "--json") == (0, "", "")
    monkeypatch.setenv("WORLD_SIZE", "1")  # of a scheduler that numbers everything
    if verb == "inspect":
        code, out, _ = gradprobe(verb, str(checkpoint), "--json")
        assert code == 0
        assert json.loads(out)


def test_processes_that_work_for_themselves_all_print(checkpoint, gradprobe, monkeypatch):
    """Those of an mpirun that are not told where to meet."""
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert gradprobe("inspect", str(checkpoint), "--json")[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert gradprobe("inspect", str(checkpoint), "--json") == (0, "", "")


@pytest.mark.slow
def test_quiet_is_silent_in_a_process_of_its_own(checkpoint, tmp_path):
    """Whatever a library writes past Python's streams would be seen here."""
    command = [*GRADPROBE, "prune", checkpoint, "--output", tmp_path / "out", "--quiet", "--json", *SMALL]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert json.loads(ran.stdout)["output"] == str(tmp_path / "out")
    assert ran.stderr == ""
    assert ran.returncode == 0


def test_quiet_keeps_warnings_and_nothing_else(checkpoint, tmp_path, gradprobe):
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    for file in model.glob("tokenizer*"):
        file.unlink()
    alone = ["--score", "magnitude", "--include", "q_proj", "--evaluation", "none", "--quiet"]
    code, _, kept = gradprobe("prune", model, "--output", tmp_path / "out", *alone)
    assert code == 0
    (line,) = kept.splitlines()
    assert line.startswith(f"no tokenizer or processor was found for {model}")


def test_logs_are_as_before(checkpoint, gradprobe):
    """Also of one who called `main` quietly."""
    root, own = logging.getLogger(), logging.getLogger("gradprobe_hf")
    before = root.handlers[:], root.level, own.level
    assert gradprobe("estimate", checkpoint, "--quiet")[0] == 0
    assert gradprobe("estimate", "/no/model")[0] == 1
    assert (root.handlers, root.level, own.level) == before


def test_every_option_has_the_spelling_that_was_promised():
    line = (
        "prune m --output o --preset best --sparsity 0.5 --pattern 2:4 --structure ffn=0.3,blocks=4 "
        "--params 0.75 --memory 200MB --latency 0.7 --measure-speed on --importance obs --structure-rounds 5 "
        "--score fisher --probes 2 --rule budget "
        "--scope global --fisher blend --update admm --dense-target 0.25 --damping 0.01 --refinement blocks "
        "--recovery-steps 4 --recovery-learning-rate 1e-4 "
        "--min-matrix-sparsity 0.1 "
        "--max-matrix-sparsity 0.9 --gradient-threshold 0.0 --reduction-factor 0.1 --spike-limit 2 --order joint "
        "--block-order size --blocks-per-step 2 --rounds 0.2,0.5 --max-metric-drop 5% --initial-sparsity 0.1 "
        "--sparsity-step 0.1 --include a --include b --exclude c --calibration c --evaluation e "
        "--task text-classification --label-column l --metric f1 "
        "--text-column c --text-template {c} --assistant-only-loss on --packing off --document-separator eos "
        "--add-special-tokens off --evaluation-samples 3 --evaluation-protocol windows "
        "--num-samples 128 --sequence-length 512 --seed 0 --batch-size 2 --checkpointing auto "
        "--accumulator-dtype int8 --accumulator-device cpu --device-map auto --max-memory {} --offload-folder f "
        "--resume-dir r --save-every 4 --dtype bfloat16 --revision v --trust-remote-code --gguf-file g --config f "
        "--merge-adapters --allow-missing-weights "
        "--push-to-hub r --private --overwrite --quiet --json"
    )
    options = vars(parser("prune").parse_args(line.split()))
    assert options["include"] == ["a", "b"]
    assert {name for name, value in options.items() if value is None} == set()
    asked = re.findall(r"--([\w-]+)", line)
    assert {name.replace("-", "_") for name in asked} == options.keys() - {"verb", "run", "model"}
    for flag, choices in {
        "--score": ["fisher", "wanda", "magnitude", "random"],
        "--rule": ["budget", "threshold"],
        "--scope": ["global", "block", "tensor", "row"],
        "--fisher": ["blend", "sequence", "token", "factored"],
        "--update": ["none", "obs", "least_squares", "admm", "sparsegpt", "sparsegpt+admm"],
    }.items():
        for choice in choices:
            parser("prune").parse_args([*PRUNE, flag, choice])


def test_every_field_is_one_option_with_a_sentence_and_its_default():
    assert set(HEADINGS.values()) <= set(OPTIONS)
    said = " ".join(parser_of("prune").format_help().split())
    for field in fields(GradProbeConfig):
        assert f"--{field.name.replace('_', '-')} " in said
        sentence = help_of(field)
        assert sentence, f"{field.name} has no entry in the docstring"
        assert "`" not in sentence
        assert " ".join(sentence.replace("%%", "%").split()) in said
        if field.default not in (None, ()):
            switch = isinstance(field.default, bool)
            default = ("off", "on")[field.default] if switch else str(field.default)
            assert re.search(rf"\(default: {re.escape(default)}[;)]", sentence)
    assert "(default: 0.5, or what --pattern implies)" in said
    assert GradProbeConfig(structure={"ffn": 0.3}).damping == "auto"
    assert "(default: 0.01; auto with --structure and --update least_squares)" in said
    of_patterns = [GradProbeConfig(pattern="2:4", preset=preset) for preset in ("fast", "balanced", "best")]
    assert [(one.probes, one.update) for one in of_patterns] == [(0, "sparsegpt"), (0, "sparsegpt+admm"), (1, "admm")]
    assert "pattern these are --update sparsegpt, --update sparsegpt+admm, and --probes 1 --update admm (" in said
    assert "(default: the preset's; without one 2 with --score fisher, else 0)" in said


def test_an_option_of_texts_is_the_same_for_pruning_and_for_recovery():
    of_pruning, of_recovery = ({one.name: one for one in fields(c)} for c in (GradProbeConfig, RecoveryConfig))
    for name in TEXT_OPTIONS:
        assert of_pruning[name].default == of_recovery[name].default
        short, whole = help_of(of_recovery[name], RecoveryConfig), help_of(of_pruning[name])
        assert whole.startswith(short.partition(" (default")[0])


def parser_of(verb):
    """The verb's own parser, in one wide column."""
    (verbs,) = (action for action in parser(verb)._actions if isinstance(action, argparse._SubParsersAction))
    found = verbs.choices[verb]
    found.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=10_000)
    return found


def test_examples_and_defaults_in_help_are_taken(gradprobe):
    """As they stand there: no dict of Python's, and no True."""
    said = " ".join(parser_of("prune").format_help().split())
    example = re.search(r"smaller wherever it is loaded: (\S+)", said)[1]
    options = parser_of("prune").parse_args(["model", "--output", "out", "--structure", example])
    assert options.structure == {"ffn": 0.3, "kv_groups": 1, "blocks": 4}
    assert "(default: on)" in said
    assert "(default: off)" in said
    assert not re.search(r"default: (True|False)", said)


def test_help_stands_under_headings():
    """Options of the configuration and of the command side by side, and no heading without an option."""
    headings = re.findall(r"^(\w.*):\n", parser_of("prune").format_help(), flags=re.MULTILINE)
    assert headings == ["positional arguments", *(name for name in OPTIONS if name != "tasks")]
    said = parser_of("prune").format_help()
    assert said.index("\ndata:") < said.index("--calibration") < said.index("--num-samples") < said.index("\nmemory:")
    few = re.findall(r"^(\w.*):\n", parser_of("inspect").format_help(), flags=re.MULTILINE)
    assert few == ["positional arguments", "options", "which model"]


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(verb, gradprobe):
    code, said, _ = gradprobe(verb, "--help")
    assert code == 0
    assert said.startswith(f"usage: gradprobe {verb} {VERBS[verb][0]}")
    assert " ".join(said.split()).count(VERBS[verb][1]) == 1
    assert VERBS[verb][1] in " ".join(gradprobe("--help")[1].split())


def test_a_new_row_is_a_choice(monkeypatch, gradprobe):
    monkeypatch.setitem(SCORES, "my score", SCORES["magnitude"])
    monkeypatch.setitem(UPDATES, "my update", UPDATES["obs"])
    assert configured("--score", "my score", "--update", "my update").update == "my update"
    said = gradprobe("prune", "--help")[1]
    assert "my score" in said
    assert "my update" in said


def test_values_are_read_by_their_types():
    found = configured("--rounds", "0.2,0.35", "--batch-size", "auto", "--checkpointing", "off")
    assert (found.rounds, found.batch_size, found.checkpointing) == ((0.2, 0.35), "auto", False)
    found = configured("--assistant-only-loss", "--checkpointing", "--quiet")
    assert (found.assistant_only_loss, found.checkpointing) == (True, True)
    assert configured("--max-metric-drop", "5%").max_metric_drop == "5%"
    assert configured("--max-metric-drop", "1.5", "--checkpointing", "auto").max_metric_drop == 1.5
    for text, value in {
        "0.5": 0.5,
        "adaptive": "adaptive",
        '{"*.mlp.*": 0.5, "*": 0}': {"*.mlp.*": 0.5, "*": 0},
    }.items():
        assert configured("--rule", "threshold", "--gradient-threshold", text).gradient_threshold == value
    assert configured("--structure", "ffn=0.3, blocks=4").structure == {"ffn": 0.3, "blocks": 4}
    with pytest.raises(SystemExit):
        configured("--structure", "ffn=8,ffn=16")
    options = parser("prune").parse_args([*PRUNE, "--device-map", '{"model": 0}', "--max-memory", '{"0": "1GiB"}'])
    assert options.device_map == {"model": 0}
    assert options.max_memory == {0: "1GiB"}


def test_a_file_of_options_and_the_command_line_over_it(checkpoint, tmp_path, gradprobe):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sparsity: 0.3\nscore: magnitude\ninclude: [q_proj]\n")
    flags = ["--config", recipe, "--sparsity", 0.25, "--evaluation", "none", "--json"]
    report = json.loads(gradprobe("prune", checkpoint, "--output", tmp_path / "out", *flags)[1])
    assert report["sparsity"] == 0.25
    assert {row["role"] for row in report["matrices"]} == {"self_attn.q_proj"}
    assert report["calibration"] is None
    recipe.write_text("seed: 010\n")
    assert configured("--config", recipe).seed == 10
    recipe.write_text("pattern: 2:4\ndamping: 1e-3\n")
    assert configured("--config", recipe).group == (2, 4)
    assert configured("--damping", 0.5, "--config", recipe).damping == 0.5  # wherever it stands
    GradProbeConfig(preset="fast").to_yaml(recipe)  # all that it comes to
    assert configured("--config", recipe, "--pattern", "2:4") == GradProbeConfig(preset="fast", pattern="2:4")
    recipe.write_text("preset: fast\nupdate: obs\n")
    assert configured("--config", recipe, "--pattern", "2:4").update == "obs"
    recipe.write_text("evaluation: pydoc\noverwrite: true\n")
    options = read([*PRUNE, "--config", str(recipe), "--evaluation", "none"])
    assert (options.evaluation, options.overwrite) == (False, True), "what is asked for is nothing, and no default"


def test_what_a_file_and_the_command_line_say_against_each_other_names_the_file(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    GradProbeConfig(sparsity=0.5).to_yaml(recipe)
    assert configured("--config", recipe, "--pattern", "1:4").sparsity == 0.75, "a pattern has a sparsity of its own"
    GradProbeConfig(sparsity=0.7).to_yaml(recipe)
    assert configured("--config", recipe, "--pattern", "unstructured").sparsity == 0.7
    GradProbeConfig(pattern="1:4").to_yaml(recipe)
    assert configured("--config", recipe, "--pattern", "unstructured").sparsity == 0.5, "0.75 was the pattern's"
    GradProbeConfig(sparsity=0.5).to_yaml(recipe)
    assert main([*PRUNE, "--config", str(recipe), "--score", "wanda"]) == 1
    assert re.search(
        rf"--score wanda takes no probe.*\({re.escape(str(recipe))} says probes\.\)", capsys.readouterr().err
    )


def test_a_run_in_one_file(checkpoint, tmp_path, gradprobe):
    """Model, data and output too; the command line wins, and another verb reads what it has a use for."""
    recipe = tmp_path / "recipe.yaml"
    options = {"model": checkpoint, "output": tmp_path / "out", "sparsity": 0.25, "score": "magnitude"}
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in options.items()) + "evaluation: none\n")
    code, said, err = gradprobe("prune", "--config", recipe, "--json")
    assert code == 0, err
    assert json.loads(said)["sparsity"] == 0.25
    assert json.loads(said)["output"] == str(tmp_path / "out")
    other = json.loads(gradprobe("prune", "--config", recipe, "--output", tmp_path / "other", "--json")[1])
    assert other["output"] == str(tmp_path / "other")
    assert json.loads(gradprobe("estimate", "--config", recipe, "--json")[1])["model"] == str(checkpoint)


def test_a_recovery_in_one_file(checkpoint, text_file, tmp_path, gradprobe):
    gradprobe("prune", checkpoint, "--output", tmp_path / "half", *SMALL)
    recipe = tmp_path / "recovery.yaml"
    options = {"model": tmp_path / "half", "teacher": checkpoint, "output": tmp_path / "out", "text": text_file}
    lines = "".join(f"{name}: {value}\n" for name, value in options.items())
    recipe.write_text(lines + "evaluation: false\nsteps: 3\nsequence_length: 16\nbatch_size: 2\n")
    code, said, err = gradprobe("recover", "--config", recipe, "--steps", 2, "--json")
    assert code == 0, err
    assert json.loads(said)["recovery"]["steps"] == 2
    for wrong, message in (
        ("lr: 1", r"recovery\.yaml: unknown option 'lr': it is called learning_rate here"),
        ("calibration: x.txt", r"recovery\.yaml: 'calibration' is no option.*recover_pretrained, text="),
        ("batch_size: none", r"recovery\.yaml: batch_size must be"),
    ):
        recipe.write_text(lines + wrong + "\n")
        code, said, err = gradprobe("recover", "--config", recipe)
        assert (code, said) == (1, "")
        assert re.search(message, err)


def test_each_stage_is_announced_once(checkpoint, tmp_path, gradprobe):
    """In a file: there a bar would be lines of its own."""
    _, _, err = gradprobe("prune", checkpoint, "--output", tmp_path / "out", *SMALL)
    lines = err.splitlines()
    assert "probe 0 ..." in lines
    assert len(set(lines)) == len(lines)
    assert "%|" not in err


def test_a_preset_wins_over_what_another_came_to_in_a_file(tmp_path):
    recipe = tmp_path / "balanced.yaml"
    GradProbeConfig(preset="balanced", num_samples=7).to_yaml(recipe)
    found = configured("--config", recipe, "--preset", "best", "--dense-target", "0.5")
    assert (found.probes, found.update, found.dense_target) == (1, "admm", 0.5)
    assert found.num_samples == 7
    assert configured("--config", recipe).probes == 2


def test_an_unknown_model_is_one_readable_line(tmp_path, gradprobe):
    code, out, err = gradprobe("prune", "nobody/no-such-model", "--output", tmp_path / "out")
    assert code == 1
    assert "nobody/no-such-model" in err
    assert "Traceback" not in err
    assert out == ""
    assert gradprobe("inspect", tmp_path)[0] == 1


class Interrupt(logging.Handler):
    """Sends this process a real SIGINT as soon as a stage is announced."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.sent = stage, False

    def emit(self, record):
        if record.getMessage().startswith(self.stage) and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)


LONG = ["--num-samples", "60", "--sequence-length", "16", "--batch-size", "1", "--evaluation-samples", "60"]
LONG += ["--probes", "2"]
STAGES = ("read data", "probe 0", "probe 1", "evaluate", "save")


@some(
    "stage",
    ["read data ...", "probe 0 ...", "probe 1 ...", "evaluate ...", "save ..."],
    fast=("probe 0 ...", "save ..."),
)
def test_ctrl_c_leaves_nothing_behind(stage, checkpoint, tmp_path, gradprobe):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    handler = Interrupt(stage)
    logging.getLogger("gradprobe_hf").addHandler(handler)
    try:
        code, out, err = gradprobe("prune", checkpoint, "--output", tmp_path / "out", *LONG)
    finally:
        logging.getLogger("gradprobe_hf").removeHandler(handler)
        signal.signal(signal.SIGINT, before)
    assert handler.sent, err
    assert code == 130
    assert "interrupted; no unfinished checkpoint" in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_ends_a_process_of_its_own(checkpoint, tmp_path):
    process = subprocess.Popen(
        [*GRADPROBE, "prune", str(checkpoint), "--output", str(tmp_path / "out"), *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a suite run in the background of a script inherits that SIGINT is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    announced = False
    for line in process.stderr:
        if line.startswith("probe 1 ..."):
            announced = True
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert announced, rest
    assert process.wait(timeout=60) == 130
    assert "interrupted; no unfinished checkpoint" in rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


LIGHT = """
import contextlib, io, json, sys
from gradprobe_hf.cli import main
heavy = {"torch", "transformers", "datasets", "matplotlib", "huggingface_hub", "accelerate", "numpy", "rich"}
found = {"import": sorted(heavy & set(sys.modules))}
for line in ("--help", "--version", "nonsense", "inspect --help", "prune --help", "estimate --help", "evaluate --help"):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(line.split())
    found[line] = sorted(heavy & set(sys.modules))
print(json.dumps(found))
"""


def test_nothing_heavy_is_imported_before_a_verb_needs_it():
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    for line in ("import", "--help", "--version", "nonsense", "inspect --help"):
        assert found[line] == [], line
    for line in ("prune --help", "estimate --help", "evaluate --help"):  # these have read the configuration
        assert not {"transformers", "datasets", "matplotlib", "accelerate", "rich"} & set(found[line]), line


def installed(script):
    path = Path(sys.executable).parent / script
    if not path.exists():
        pytest.skip("the package is not installed here")
    return str(path)


def test_the_entry_points_start():
    for command in ([installed("gradprobe")], [installed("hf-gradprobe")], GRADPROBE):
        ran = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
        assert ran.returncode == 0
        assert "prune" in ran.stdout


class Seen(BaseException):
    """No error of a load, which would be explained."""


def test_which_model_it_is_reaches_the_loader(monkeypatch, tmp_path):
    seen = {}

    def from_pretrained(name, **source):
        seen.update(source)
        raise Seen

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", from_pretrained)
    for verb in (
        ["prune", "--output", str(tmp_path / "out")],
        ["compare"],
        ["evaluate", "--data", "pydoc"],
        ["estimate"],
    ):
        seen.clear()
        with pytest.raises(Seen):
            main([verb[0], "someone/model", *verb[1:], "--revision", "v2", "--trust-remote-code"])
        assert seen == {"revision": "v2", "trust_remote_code": True}, verb


def test_the_version_is_the_packages(gradprobe):
    assert gradprobe("--version") == (0, f"gradprobe_hf {versions()['gradprobe_hf']}\n", "")
    assert gradprobe_hf.__version__ == versions()["gradprobe_hf"]


@pytest.mark.slow
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
