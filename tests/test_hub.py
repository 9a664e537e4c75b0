"""What is written: complete, loadable without this package, whole or not at all; and pushed to a loopback Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.checkpoint.push import kept_in, push_folder
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.loading.stored_files import remember_source
from gradprobe_hf.report.card.build import build_card, set_options
from tests import cases, labelled
from tests.loopback_hub import TOKEN, Repository

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("pictures")


def prune(source, text_file, **options):
    config = GradProbeConfig(sparsity=0.5, num_samples=4, sequence_length=16, evaluation_samples=4)
    return prune_pretrained(source, config, calibration=str(text_file), evaluation="pydoc", progress=False, **options)


@pytest.fixture(scope="module")
def written(checkpoint, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "tiny-50"
    base = checkpoint / "README.md"
    base.write_text("---\nlicense: mit\nlanguage: en\nbase_model: someone/tiny-llama\n---\n# The base's own words\n")
    return prune(str(checkpoint), text_file, output_dir=folder), folder


def test_the_folder_is_complete(written):
    _, folder = written
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "gradprobe_config.json",
        "gradprobe_report.json",
        "README.md",
        "assets/sparsity.png",
        "assets/perplexity.png",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["gradprobe"]["sparsity"] == pytest.approx(0.5, abs=1e-4)
    assert "quantization_config" not in config
    assert GradProbeConfig.from_pretrained(folder) == written[0].config
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    modes = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert len(modes) == 1  # whoever may read the configuration may read the weights


def test_it_loads_and_the_card_s_snippet_runs_where_this_package_is_not(written):
    """`-I -S` would lose torch too, so the import of this package is what is forbidden."""
    result, folder = written
    snippet = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]
    script = (
        "import sys; sys.modules['gradprobe_hf'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"t = AutoTokenizer.from_pretrained({str(folder)!r})\n"
        "print(sum(int((p == 0).sum()) for n, p in m.named_parameters() if 'layers' in n and p.ndim == 2))\n"
    )
    command = [sys.executable, "-c", script + snippet]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.splitlines()[0]) == result.report.zeros
    assert "The largest ocean is" in ran.stdout
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in result.model.state_dict().items():
        assert torch.equal(value, reloaded.state_dict()[name])


def test_the_snippet_of_a_model_that_is_talked_to_talks(checkpoint, tmp_path, capsys, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
    config = GradProbeConfig(sparsity=0.5, score="magnitude")
    prune_pretrained(str(checkpoint), config, processing_class=tokenizer, output_dir=tmp_path / "chat", progress=False)
    card = (tmp_path / "chat" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", card, re.S)[1], {})
    assert '"role": "user"' in card
    assert capsys.readouterr().out.strip()


def test_so_does_that_of_one_that_is_shown_pictures(tmp_path, capsys, monkeypatch):
    """A text without the mark of an image would have no place for it."""
    case = labelled.CASES["llava"]
    model, processor = labelled.build("llava"), case.processor()
    processor.chat_template = (
        "{% for m in messages %}{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}"
        "{% endfor %}"
    )
    cases.prune(model, case.rows(), processing_class=processor, score="magnitude", output_dir=tmp_path / "shown")
    case.rows()[0]["image"].save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", (tmp_path / "shown" / "README.md").read_text(), re.S)[1], {})
    assert capsys.readouterr().out.strip()


def test_the_report_has_everything(written):
    report = json.loads((written[1] / "gradprobe_report.json").read_text())
    assert {row["name"] for row in report["matrices"]} == set(written[0].masks)
    for row in report["matrices"]:
        assert row["pruned"] == int(written[0].masks[row["name"]].sum())
        assert 0 <= row["score_min"] <= row["score_max"]
        assert row["budget"] == round(0.5 * row["weights"])
    assert {"load", "read data", "probe 0", "candidates", "reconstruction", "evaluate"} <= set(report["timings"])
    assert report["memory"]["peak_resident_bytes"] > 10**7
    assert len(report["calibration"]["fingerprint"]) == 64
    assert report["versions"]["torch"] == torch.__version__
    assert report["config"]["seed"] == 0
    assert report["probes"]["probe 0"] > 0


def test_the_card(written):
    result, folder = written
    text = (folder / "README.md").read_text()
    data = ModelCard.load(folder / "README.md").data
    assert data.base_model == "someone/tiny-llama"
    assert "`tiny-llama` (derived from [someone/tiny-llama]" in text
    assert data.license == "mit"
    assert data.language == "en"
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation"
    assert "pruning" in data.tags
    perplexity = result.report.evaluation["pruned"]["perplexity"]
    assert data.eval_results[0].metric_value == pytest.approx(perplexity, abs=1e-4)
    assert f"{perplexity:,.4f}" in text
    assert f"{result.report.evaluation['dense']['perplexity']:,.2f}" in text
    assert "4 windows of 16 tokens" in text
    assert "stored densely" in text
    assert "someone/tiny-llama" in text
    assert "The base's own words" not in text
    assert str(folder.parent) not in text  # no path of the machine it was made on
    block = re.search(r"```yaml\n(.*?)```", text, re.S)[1]
    assert GradProbeConfig.from_dict(yaml.safe_load(block)) == result.config
    for group in result.report.by("block"):
        assert f"| `{group.label}` | {group.weights:,} | {group.zeros:,} | {group.sparsity:.2%} |" in text
    for picture in re.findall(r"\]\((assets/.*?)\)", text):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "threshold"}, "Candidates were proposed by `fisher`"),
        ({"probes": 2}, "The loss gradient was measured twice over the calibration data"),
        ({"preset": "fast"}, "The loss gradient was measured over the calibration data"),
        ({"pattern": "2:4"}, "The loss gradient was measured over the calibration data"),
        ({"update": "sparsegpt"}, "SparseGPT: block by block"),
        ({"score": "magnitude"}, "Each weight was scored by its magnitude."),
        ({"score": "wanda"}, "over the calibration data (Wanda)."),
    ],
)
def test_every_kind_of_run_has_a_card(options, said, checkpoint, tmp_path):
    config = GradProbeConfig(num_samples=4, sequence_length=16, **options)
    prune_pretrained(str(checkpoint), config, evaluation=False, output_dir=tmp_path / "out", progress=False)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "**not measured**" in text
    assert "one number on one text" not in text
    assert said in text
    assert (", pruned to 2:4\n" in text) == ("pattern" in options)
    assert ("\nsparsity: 0.5\n" in text) == ("pattern" not in options)
    blocks_are_alike = bool(options.keys() & {"pattern", "update", "score"})
    assert ("| `model.layers.0` to `model.layers." in text) == blocks_are_alike
    assert ("Calibration.** None" in text) == (options.get("score") == "magnitude")
    assert not (tmp_path / "out" / "assets" / "perplexity.png").exists()


@pytest.mark.parametrize("options", [{"sparsity": 0.0002, "probes": 1}, {"sparsity": 0.9998, "probes": 1}])
def test_a_card_rounds_to_none_and_all_only_what_is(options):
    result = cases.prune(cases.build("llama"), cases.batches("llama"), **options)
    said = str(build_card(result.report, result.config, {}, "me/half")).partition("## ")[0]
    assert not re.search(r"(?<![\d.])(0|0\.0|100|100\.0)%", said), said


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, {"sparsity": 0.5}),
        ({"preset": "fast"}, {"sparsity": 0.5, "preset": "fast", "update": "none"}),
        ({"pattern": "4:8", "num_samples": 64}, {"pattern": "4:8", "num_samples": 64}),
        ({"probes": 1}, {"sparsity": 0.5, "score": "fisher", "probes": 1, "rule": "budget", "update": "none"}),
        ({"structure": {"ffn": 64}}, {"structure": {"ffn": 64}}),
        ({"structure": {"ffn": 64}, "damping": 0.01}, {"structure": {"ffn": 64}, "damping": 0.01}),
        ({"structure": "auto", "params": 0.75, "seed": 3}, {"structure": "auto", "params": 0.75, "seed": 3}),
        ({"rounds": (0.2, 0.4), "probes": 2}, {"sparsity": 0.4, "probes": 2, "update": "none", "rounds": [0.2, 0.4]}),
    ],
)
def test_the_options_on_a_card_make_its_configuration_again(options, shown):
    config = GradProbeConfig(**options)
    found = yaml.safe_load(yaml.safe_dump(set_options(config)))
    assert found == shown
    assert GradProbeConfig.from_dict(found) == config


@pytest.mark.parametrize(
    "options",
    [
        {"update": "admm"},
        {"pattern": "2:4", "update": "admm"},
        {"update": "admm", "dense_target": 1.0},
        {"update": "admm", "damping": 0.1},
        {"preset": "fast", "pattern": "2:4", "dense_target": 0.25, "update": "obs"},
        {"score": "random", "update": "admm"},
        {"score": "wanda"},
        {"update": "sparsegpt+admm"},
    ],
)
def test_so_do_those_of_a_method_that_is_no_preset(options):
    config = GradProbeConfig(**options)
    assert GradProbeConfig.from_dict(yaml.safe_load(yaml.safe_dump(set_options(config)))) == config


def test_models_without_perplexity_have_a_card_too(tmp_path):
    for name in ("bert", "vit", "t5"):
        prune_pretrained(
            cases.build(name),
            calibration=cases.batches(name),
            evaluation=cases.batches(name, seed=5),
            output_dir=tmp_path / name,
            progress=False,
        )
        text = (tmp_path / name / "README.md").read_text()
        assert "| loss |" in text
        assert "mean loss, in nats" in text


def test_an_existing_folder_is_refused_and_replaced_only_when_told(written, checkpoint, text_file, tmp_path):
    result, folder = written
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite"):
        result.save_pretrained(copy)
    with pytest.raises(FileExistsError):
        prune(str(checkpoint), text_file, output_dir=copy)
    with pytest.raises(FileExistsError, match=r"holds notes\.txt, which is no part of a checkpoint"):
        result.save_pretrained(copy, overwrite=True)
    (copy / "notes.txt").rename(tmp_path / "notes.txt")
    (copy / "tokenizer.model").write_text("of the model before")
    result.save_pretrained(copy, overwrite=True)
    assert not (copy / "tokenizer.model").exists()
    (tmp_path / "notes.txt").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="not a model checkpoint"):
        result.save_pretrained(tmp_path / "precious", overwrite=True)
    (copy / ".git").mkdir()
    with pytest.raises(FileExistsError, match="not a model checkpoint"):
        result.save_pretrained(copy, overwrite=True)
    with pytest.raises(ValueError, match="is a model that is read"):
        prune(str(checkpoint), text_file, output_dir=checkpoint, overwrite=True)


def test_a_result_that_was_not_applied_saves_pruned_weights(checkpoint, text_file, tmp_path):
    result = prune(str(checkpoint), text_file, apply=False)
    before = {name: value.clone() for name, value in result.model.state_dict().items()}
    result.save_pretrained(tmp_path / "out")
    assert all(torch.equal(value, before[name]) for name, value in result.model.state_dict().items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all((saved.get_parameter(name)[mask] == 0).all() for name, mask in result.masks.items())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("when", ["before", "while writing"])
def test_a_full_disk(when, checkpoint, text_file, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.decode().strip()}")
    try:
        model = cases.build("llama")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if when == "while writing":
            monkeypatch.setattr("gradprobe_hf.checkpoint.destination.check_room", lambda *_: None)
        with pytest.raises(OSError, match=r"No space left|free; nothing was written|disk is full"):
            prune(model, text_file, output_dir=small / "out", processing_class=cases.tokenizer())
        assert list(small.iterdir()) == []
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(("number", "said"), [(28, "the disk is full"), (5, "could not write .*os error 5")])
def test_what_tokenizers_says_of_a_disk_is_an_error_of_the_disk(number, said, text_file, tmp_path, monkeypatch):
    """It raises plain `Exception`, which the command line took for a fault of its own."""
    tokenizer = cases.tokenizer()

    def full(*_, **__):
        raise Exception(f"{os.strerror(number)} (os error {number})")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match=said):
        prune(cases.build("llama"), text_file, output_dir=tmp_path / "out", processing_class=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_an_infinite_perplexity_and_a_broken_base_card_cost_no_result(checkpoint, text_file, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "README.md").write_text("---\nlicense: [\n---\n")
    result = prune(str(source), text_file, apply=False)
    for measured in ("dense", "pruned"):
        result.report.evaluation[measured]["perplexity"] = float("inf")
    result.save_pretrained(tmp_path / "out")
    assert "| perplexity | inf | inf |" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "assets" / "perplexity.png").exists()


HUB_SCRIPT = """
import sys
from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
source, text, repo, out = sys.argv[1:5]
config = GradProbeConfig(num_samples=4, sequence_length=16, evaluation_samples=4)
result = prune_pretrained(source, config, calibration=text, evaluation="pydoc", progress=False,
                          push_to_hub=repo, output_dir=out or None)
print(result.push_to_hub(repo, revision="second"))
print(result.push_to_hub(repo, create_pr=True))
"""


def push(user, checkpoint, text_file, repo, home, token=TOKEN, output=""):
    return user.run(HUB_SCRIPT, checkpoint, text_file, repo, output, cwd=home, environment={"HF_TOKEN": token})


def test_push_and_load_again(hub, user, checkpoint, text_file, tmp_path):
    ran = push(user, checkpoint, text_file, "tiny-50", tmp_path)  # a bare name becomes the user's own
    assert ran.returncode == 0, ran.stderr
    assert "/me/tiny-50/commit/" in ran.stdout
    assert "/me/tiny-50/discussions/1" in ran.stdout
    assert hub.unknown == []
    main, second = (hub.repositories["me/tiny-50"].revisions[name] for name in ("main", "second"))
    assert (
        set(main) == set(second) >= {"model.safetensors", "README.md", "gradprobe_report.json", "assets/sparsity.png"}
    )
    assert all(TOKEN.encode() not in content for content in main.values())
    assert TOKEN not in ran.stdout + ran.stderr
    assert b'from_pretrained("me/tiny-50")' in main["README.md"]
    assert b'from_pretrained("me/tiny-50", revision="second")' in second["README.md"]
    script = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "m = AutoModelForCausalLM.from_pretrained('me/tiny-50'); AutoTokenizer.from_pretrained('me/tiny-50')\n"
        "m.save_pretrained('again')\n"
    )
    ran = user.run(script, cwd=tmp_path, environment={"HF_TOKEN": None})
    assert ran.returncode == 0, ran.stderr
    ours = prune(str(checkpoint), text_file)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_a_recovered_model_is_pushed(hub, user, checkpoint, text_file, written, tmp_path):
    """In the run itself, and afterwards, from Python and from the command line."""
    _, pruned = written
    script = """
import sys
from gradprobe_hf import RecoveryConfig, recover_pretrained
pruned, dense, text = sys.argv[1:4]
config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16)
result = recover_pretrained(pruned, dense, config, text=text, evaluation=False, progress=False,
                            push_to_hub="tiny-again")
print(result.push_to_hub("me/tiny-again", create_pr=True))
"""
    environment = {"HF_TOKEN": TOKEN}
    ran = user.run(script, pruned, checkpoint, text_file, cwd=tmp_path, environment=environment)
    assert ran.returncode == 0, ran.stderr
    assert "/me/tiny-again/discussions/1" in ran.stdout
    main = hub.repositories["me/tiny-again"].revisions["main"]
    assert set(main) >= {"model.safetensors", "README.md", "gradprobe_report.json"}
    assert b'from_pretrained("me/tiny-again")' in main["README.md"]
    assert json.loads(main["gradprobe_report.json"])["recovery"]["steps"] == 1

    command = "import sys; from gradprobe_hf.cli import main; sys.exit(main(sys.argv[1:]))"
    verb = f"recover {pruned} --teacher {checkpoint} --text {text_file} --evaluation none --steps 1 --batch-size 2"
    options = "--sequence-length 16 --output again --push-to-hub me/once-more --private --quiet"
    ran = user.run(command, *verb.split(), *options.split(), cwd=tmp_path, environment=environment)
    assert ran.returncode == 0, ran.stderr
    pushed = hub.repositories["me/once-more"]
    assert pushed.private
    assert pushed.revisions["main"]["model.safetensors"] == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert hub.unknown == []


def test_a_recovery_that_cannot_be_pushed_fails_before_the_work(hub, user, checkpoint, text_file, written, tmp_path):
    _, pruned = written
    command = "import sys; from gradprobe_hf.cli import main; sys.exit(main(sys.argv[1:]))"
    verb = f"recover {pruned} --teacher {checkpoint} --text {text_file} --output again --push-to-hub someone-else/tiny"
    ran = user.run(command, *verb.split(), cwd=tmp_path, environment={"HF_TOKEN": TOKEN})
    assert ran.returncode == 1
    assert "refuses to let you write to someone-else/tiny" in ran.stderr
    assert not (tmp_path / "again").exists()


PUSH_SCRIPT = """
import sys
from gradprobe_hf.checkpoint.push import check_push, push_folder
check_push("me/again")
push_folder(sys.argv[1], "me/again")
"""


def test_weights_of_an_earlier_push_are_not_there_beside_the_new_ones(hub, user, tmp_path):
    """transformers takes model.safetensors before any shards, and vLLM what an index names."""
    old = {"one": ["model.safetensors"], "shards": ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]}
    for before, after in (("one", "shards"), ("shards", "one")):
        hub.repositories["me/again"] = Repository()
        files = hub.repositories["me/again"].revisions["main"]
        files |= dict.fromkeys([*old[before], "notes.txt"], b"old")
        files |= dict.fromkeys(("pytorch_model.bin", "pytorch_model-00001-of-00001.bin"), b"old")
        (tmp_path / after).mkdir()
        for name in old[after]:
            (tmp_path / after / name).write_text("new")
        ran = user.run(PUSH_SCRIPT, tmp_path / after, cwd=tmp_path, environment={"HF_TOKEN": TOKEN})
        assert ran.returncode == 0, ran.stderr
        assert files == {**dict.fromkeys(old[after], b"new"), "notes.txt": b"old"}
    files["adapter_config.json"] = b"{}"
    ran = user.run(PUSH_SCRIPT, tmp_path / "one", cwd=tmp_path, environment={"HF_TOKEN": TOKEN})
    assert "me/again holds an adapter (adapter_config.json)" in ran.stderr


def test_a_tokenizer_of_an_earlier_push_is_not_there_beside_the_new_one(hub, user, tmp_path):
    """Its template and special tokens would be read with the new one, and what was measured had others."""
    old = ["chat_template.jinja", "special_tokens_map.json", "tokenizer.model", "generation_config.json"]
    kept = ["notes.txt", "preprocessor_config.json", "model.gguf", "onnx/model.onnx", "word2vec.model", "vocab.pt"]
    kept += ["how-to-merge-the-adapter.md", "my-adapter"]
    kept += ["q50/spiece.model", "original/tokenizer.model", "vision/model.safetensors"]  # other models' files
    own = ["gradprobe_config.json", "LICENSE-adapter.txt", "assets/sparsity.png"]  # of the run that had pruned it
    new = {"with": ["model.safetensors", "tokenizer_config.json"], "without": ["model.safetensors"]}
    for name, files in new.items():
        hub.repositories[f"me/{name}"] = Repository(revisions={"main": dict.fromkeys([*old, *own, *kept], b"old")})
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("new")
    script = (
        "from gradprobe_hf.checkpoint.push import *; [push_folder(one, f'me/{one}') for one in ('with', 'without')]"
    )
    ran = user.run(script, cwd=tmp_path, environment={"HF_TOKEN": TOKEN})
    assert ran.returncode == 0, ran.stderr
    found = {name: set(hub.repositories[f"me/{name}"].revisions["main"]) for name in new}
    assert found == {"with": {*new["with"], *kept}, "without": {*new["without"], *kept, *old[:3]}}


ADAPTER_SCRIPT = """
from gradprobe_hf.checkpoint.push import check_push
for branch in ("tuned", "main", "new"):
    try:
        print(branch, check_push("me/it", revision=branch))
    except ValueError as error:
        print(branch, error)
"""


def test_an_adapter_on_another_branch_is_no_hindrance_and_one_on_this_branch_is(hub, user, tmp_path):
    hub.repositories["me/it"] = Repository(revisions={"main": {}, "tuned": {"adapter_config.json": b"{}"}})
    ran = user.run(ADAPTER_SCRIPT, cwd=tmp_path, environment={"HF_TOKEN": TOKEN})
    tuned, *others = ran.stdout.splitlines()
    assert "me/it holds an adapter" in tuned
    assert "is replaced" not in ran.stderr
    for name, tag, is_told in (("ours", "gradprobe", False), ("mine", "mine", True)):
        card = f"---\ntags: [{tag}]\n---\nA card.\n".encode()
        hub.repositories[f"me/{name}"] = Repository(revisions={"main": {"README.md": card}})
        script = ADAPTER_SCRIPT.replace("me/it", f"me/{name}")
        ran = user.run(script, cwd=tmp_path, environment={"HF_TOKEN": TOKEN})
        assert (f"the card that me/{name} has (README.md) is replaced" in ran.stderr) == is_told
    assert others == ["main me/it", "new me/it"]


def test_the_repository_of_the_model_itself_is_refused_before_the_work(written, checkpoint, tmp_path, monkeypatch):
    """As its folder is: the dense weights would be gone."""
    for module in ("destination", "saving"):
        monkeypatch.setattr(f"gradprobe_hf.checkpoint.{module}.check_push", lambda name, *_: f"me/{name}")
        monkeypatch.setattr(f"gradprobe_hf.checkpoint.{module}.push_folder", lambda *_, **__: "uploaded")
    monkeypatch.setattr("gradprobe_hf.pruning.decide_pruning", lambda *_: pytest.fail("it was probed"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.name_or_path = "me/tiny"
    with pytest.raises(ValueError, match="push_to_hub='me/tiny' is a model that is read"):
        cases.prune(model, cases.batches("llama"), output_dir=tmp_path / "tiny", push_to_hub=True)
    assert not (tmp_path / "tiny").exists()
    result, _ = written
    monkeypatch.setattr(result.model, "name_or_path", "me/tiny")
    for same in ("tiny", "Tiny"):  # to the Hub
        for revision in (None, "main"):
            with pytest.raises(ValueError, match="is a model that is read"):
                result.push_to_hub(same, revision=revision)
    assert result.push_to_hub("tiny", revision="pruned") == "uploaded"
    assert result.push_to_hub("tiny", revision="main", create_pr=True) == "uploaded"
    remember_source(result.model, {"revision": "v2"})
    with pytest.raises(ValueError, match="'me/tiny' is a model that is read at 'v2'"):
        result.push_to_hub("tiny", revision="v2")


def test_the_repository_that_a_pruned_folder_came_from_is_refused_too(written, text_file, tmp_path, monkeypatch):
    """Pruned once more from its folder, which has another name than the dense model of the Hub."""
    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.check_push", lambda name, *_: name)
    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.push_folder", lambda *_, **__: "uploaded")
    once = tmp_path / "once"
    shutil.copytree(written[1], once)
    card = ModelCard.load(once / "README.md")
    card.data.base_model = ["me/dense"]
    card.save(once / "README.md")
    with pytest.raises(ValueError, match=r"push_to_hub='Me/Dense' is a model that '.*once' was made from, by its card"):
        prune(str(once), text_file, push_to_hub="Me/Dense")
    assert prune(str(once), text_file, push_to_hub="me/pruned", output_dir=tmp_path / "twice").report.zeros


def test_the_repository_of_a_teacher_is_refused_before_the_work(written, checkpoint, text_file, monkeypatch):
    for module in ("destination", "saving"):
        monkeypatch.setattr(f"gradprobe_hf.checkpoint.{module}.check_push", lambda name, *_: f"me/{name}")
    _, pruned = written
    teacher = AutoModelForCausalLM.from_pretrained(checkpoint)
    teacher.name_or_path = "me/dense"
    config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16)
    options = {"text": str(text_file), "evaluation": False, "progress": False}
    result = recover_pretrained(pruned, teacher, config, **options)
    for revision in (None, "main"):
        with pytest.raises(ValueError, match="push_to_hub='me/dense' is a model that is read"):
            result.push_to_hub("dense", revision=revision)
    monkeypatch.setattr("gradprobe_hf.recovery.recover.distil", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match="push_to_hub='me/dense' is a model that is read"):
        recover_pretrained(pruned, teacher, config, push_to_hub="dense", **options)


def test_an_upload_that_fails_says_where_the_checkpoint_is(written, checkpoint, text_file, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError("the Hub answered 500.")

    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.check_push", lambda name, *_: name)
    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.push_folder", refused)
    _, pruned = written
    config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16)
    options = {"evaluation": False, "progress": False, "output_dir": tmp_path / "again", "push_to_hub": "me/tiny"}
    with pytest.raises(OSError, match=rf"answered 500\. The checkpoint is kept in {tmp_path / 'again'}"):
        recover_pretrained(pruned, checkpoint, config, text=str(text_file), **options)
    assert (tmp_path / "again" / "model.safetensors").is_file()


@pytest.mark.parametrize("trains", [False, True])
def test_a_result_whose_only_copy_is_uploaded_is_kept(trains, written, checkpoint, text_file, monkeypatch):
    """The network may be gone behind hours of work: it is not asked again until all is written."""
    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.check_push", lambda name, *_: name)
    monkeypatch.setattr("gradprobe_hf.checkpoint.saving.check_push", lambda *_: pytest.fail("it was asked again"))

    def gone(*_, **__):
        raise httpx2.ConnectError("connection refused")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", gone)
    config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16)
    options = {"text": str(text_file), "evaluation": False, "progress": False}
    run = partial(recover_pretrained, written[1], checkpoint, config, **options)
    if not trains:
        run = partial(prune, str(checkpoint), text_file)
    with pytest.raises(OSError, match=r"cannot be reached .* The checkpoint is kept in (.*)\.$") as caught:
        run(push_to_hub="me/tiny")
    folder = Path(re.search(r"kept in (.*)\.$", str(caught.value))[1])
    assert inspect_checkpoint(folder).zeros == written[0].report.zeros
    shutil.rmtree(folder.parent)


def test_a_file_that_does_not_go_up_is_said_without_the_signature(tmp_path, monkeypatch):
    """By huggingface_hub as a RuntimeError, with the reason behind it."""

    def refused(*_, **__):
        try:
            raise ValueError("403 Forbidden for url 'https://bucket/model.safetensors?X-Amz-Signature=secret'")
        except ValueError as error:
            raise RuntimeError("Error while uploading 'model.safetensors' to the Hub.") from error

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: [])
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", refused)
    with pytest.raises(OSError, match="Error while uploading") as caught, kept_in(tmp_path):
        push_folder(tmp_path, "me/tiny")
    assert str(caught.value) == (
        "Error while uploading 'model.safetensors' to the Hub. 403 Forbidden for url 'https://bucket/model.safetensors'"
        f" The checkpoint is kept in {tmp_path}."
    )


def test_no_repository_is_made_for_a_recovery_whose_text_is_too_short(written, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.check_push", lambda *_: pytest.fail("it was made"))
    (tmp_path / "short.txt").write_text("Too short.")
    _, pruned = written
    config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16)
    with pytest.raises(ValueError, match=r"short\.txt"):
        recover_pretrained(
            pruned, checkpoint, config, text=str(tmp_path / "short.txt"), evaluation=False, push_to_hub="me/tiny"
        )


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("me/tiny", None, "hf auth login"),
        ("me/tiny", "hf_wrong", "hf auth login"),
        ("someone-else/tiny", TOKEN, "refuses to let you write to someone-else/tiny"),
        ("not a name", TOKEN, "not a repository name"),
    ],
)
def test_a_push_that_cannot_work_fails_before_the_work(
    repo, token, message, hub, user, checkpoint, text_file, tmp_path
):
    ran = push(user, checkpoint, text_file, repo, tmp_path, token, output=str(tmp_path / "out"))
    assert ran.returncode != 0
    assert message in ran.stderr
    assert "hf_wrong" not in ran.stderr
    assert not (tmp_path / "out").exists()
    assert not hub.repositories


def test_a_repository_that_can_only_be_read_is_refused_before_the_work(hub, user, checkpoint, text_file, tmp_path):
    hub.repositories["them/public"] = Repository()
    ran = push(user, checkpoint, text_file, "them/public", tmp_path, output=str(tmp_path / "out"))
    assert ran.returncode != 0
    assert "refuses to let you write to them/public" in ran.stderr
    assert hub.unknown == []
    assert not (tmp_path / "out").exists()


def test_a_pull_request_takes_no_right_to_write(hub, user, checkpoint, tmp_path):
    hub.repositories["them/public"] = Repository()
    script = """
import sys
from gradprobe_hf import GradProbeConfig, prune_pretrained
result = prune_pretrained(sys.argv[1], GradProbeConfig(score="magnitude"), evaluation=False, progress=False)
print(result.push_to_hub("them/public", create_pr=True))
"""
    ran = user.run(script, checkpoint, cwd=tmp_path, environment={"HF_TOKEN": TOKEN})
    assert ran.returncode == 0, ran.stderr
    assert "/them/public/discussions/1" in ran.stdout
    result = cases.prune(cases.build("llama"), cases.batches("llama"), score="magnitude")
    with pytest.raises(ValueError, match=r"create_pr=True with revision='branch'"):
        result.push_to_hub("them/public", create_pr=True, revision="branch")


def test_a_gated_model_says_what_to_do(hub, user, tmp_path):
    hub.repositories["them/gated"] = Repository(gated=True)
    command = "import sys; from gradprobe_hf.cli import main; sys.exit(main(sys.argv[1:]))"
    ran = user.run(command, "prune", "them/gated", "--output", tmp_path / "out", cwd=tmp_path)
    assert ran.returncode == 1
    assert "cannot load 'them/gated'" in ran.stderr
    assert "hf auth login" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_hub_that_cannot_be_reached_is_one_readable_line(hub, user, checkpoint, text_file, tmp_path):
    with hub.unreachable():
        ran = push(user, checkpoint, text_file, "me/tiny", tmp_path)
    assert ran.returncode != 0
    assert "cannot be reached" in ran.stderr.splitlines()[-1]


def test_damaged_files_are_refused_by_name(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(OSError, match=r"cannot load .*broken"):
        prune_pretrained(str(broken), progress=False)
    with pytest.raises(ValueError, match="is damaged"):
        inspect_checkpoint(broken)
    (tmp_path / "bad.jsonl").write_text("{not json")
    with pytest.raises(ValueError, match=r"bad\.jsonl cannot be read as json"):
        prune_pretrained(str(checkpoint), calibration=tmp_path / "bad.jsonl", progress=False)


def test_the_protocol_is_what_another_reader_would_compute(written, checkpoint):
    """The perplexities in the report, computed again with nothing but transformers and the saved files."""
    result, folder = written
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = load_batches(
        "pydoc",
        WindowSpec(4, 16, 4),
        part="evaluation",
        model=result.model,
        processing_class=tokenizer,
    )
    for source, name in ((checkpoint, "dense"), (folder, "pruned")):
        model = AutoModelForCausalLM.from_pretrained(source).eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                losses += [model(input_ids=row[None], labels=row[None]).loss for row in batch["input_ids"]]
        wanted = torch.stack(losses).mean().exp().item()
        assert result.report.evaluation[name]["perplexity"] == pytest.approx(wanted, rel=1e-5)
        assert measure(cases.workload(model, held_out)).perplexity == pytest.approx(wanted, rel=1e-5)
