"""Checkpoints side by side: what is counted is right, and they take turns."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from gradprobe_hf import GradProbeConfig, bench_pretrained, prune_pretrained
from gradprobe_hf.bench.bench import WARMUP, _prompt_length, _sizes, measured_rounds
from gradprobe_hf.bench.result import BenchResult, BenchRow, Timing
from gradprobe_hf.bench.subject import Facts, Generated, Subject, Workload
from gradprobe_hf.bench.worker import Worker, serve
from gradprobe_hf.checkpoint import file_sizes
from gradprobe_hf.checkpoint.file_sizes import FileSizes, checkpoint_files
from gradprobe_hf.cli.main import main
from gradprobe_hf.cli.tables.bench import print_bench
from gradprobe_hf.report.report import Report
from gradprobe_hf.report.speed import times_as_fast
from tests import cases
from tests.conftest import Here

pytestmark = pytest.mark.usefixtures("pictures")
WORK = Workload(prompt_length=8, new_tokens=4)
PAUSE = 0.005  # seconds
MAPS = Path("/proc/self/maps")


def calls_of(model):
    """The lengths of the texts that each forward pass is given; each also takes a while."""
    found = []

    def note(module, args, kwargs):
        found.append((kwargs.get("input_ids", args[0] if args else None)).shape[1])
        time.sleep(PAUSE)

    model.register_forward_pre_hook(note, with_kwargs=True)
    return found


def test_a_pass_reads_the_prompt_and_a_text_is_written_token_by_token():
    model = cases.build("llama")
    subject, seen = Subject(model), calls_of(model)
    assert subject.prefill(WORK) >= PAUSE
    assert seen == [8]
    seen.clear()
    made = subject.generate(WORK)
    assert seen == [8, 1, 1, 1]  # with a cache: nothing is read twice, and an end-of-text token ends nothing
    assert made.first_token >= PAUSE
    assert made.per_token >= PAUSE
    assert (subject.facts.writes, subject.facts.positions, subject.facts.dtype) == (True, 64, "float32")
    assert subject.facts.parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    "option", [{"guidance_scale": 2.0}, {"prompt_lookup_num_tokens": 3}, {"stop_strings": ["a"]}, {"max_time": 1e-9}]
)
def test_a_checkpoints_options_of_generation_have_no_part_in_it(option):
    """They would run the model twice for a token, end the text, or ask for a tokenizer."""
    model = cases.build("llama")
    model.generation_config = GenerationConfig(**option)
    seen = calls_of(model)
    assert Subject(model).generate(WORK).per_token >= PAUSE
    assert seen == [8, 1, 1, 1]
    assert model.generation_config.to_diff_dict().items() >= option.items()


@pytest.mark.parametrize(("name", "writes"), [("bert", False), ("vit", False), ("t5", True)])
def test_what_writes_no_text_is_measured_by_its_forward_pass(name, writes):
    subject = Subject(cases.build(name))
    assert subject.facts.writes is writes
    assert subject.prefill(WORK) > 0
    if writes:
        assert subject.generate(WORK).per_token > 0


def test_what_reads_a_text_is_not_compared_with_what_reads_an_image():
    """The time of one would stand as that of the other, and the length of the text nowhere."""
    facts = [Subject(cases.build(name)).facts for name in ("llama", "vit")]
    with pytest.raises(ValueError, match=r"^a reads text, and b none: measure them apart\.$"):
        _prompt_length(["a", "b"], facts, None, 4)


class OwnForward(LlamaForCausalLM):
    """Code of its own, whose random batches have a mask from the start."""

    def forward(self, input_ids=None, attention_mask=None, **options):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)


def test_code_of_its_own_writes_as_others_do():
    model = OwnForward(cases.build("llama").config).eval()
    seen = calls_of(model)
    assert Subject(model).generate(WORK).per_token >= PAUSE
    assert seen == [8, 1, 1, 1]


@pytest.mark.slow
def test_of_a_model_that_reads_images_no_tokens_are_said(tmp_path, capsys):
    cases.build("vit").save_pretrained(tmp_path / "vit")
    command = ["bench", str(tmp_path / "vit"), "--repeats", "1", "--quiet"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "forward pass, ms" in said
    assert "tokens" not in said
    assert main([*command, "--prompt-length", "8"]) == 1
    assert "--prompt-length 8 has no effect here" in capsys.readouterr().err


@pytest.mark.slow
def test_the_card_of_what_reads_images_says_no_tokens(tmp_path):
    model = cases.build("vit")
    config = GradProbeConfig(structure={"ffn": 8}, update="none", measure_speed=True)
    given = {"calibration": cases.batches("vit"), "evaluation": False, "progress": False}
    prune_pretrained(model, config, output_dir=tmp_path / "made", **given)
    card = (tmp_path / "made" / "README.md").read_text()
    assert "| forward pass, ms |" in card
    assert "**Speed.** One input at a time; cpu" in card
    assert "time to read a text" not in card


class Listed:
    """Answers from a list, and notes in which order it is asked."""

    def __init__(self, name, asked, values):
        self.name, self.asked, self.values = name, asked, iter(values)

    def ask(self, method, *_):
        self.asked.append((self.name, method))
        value = next(self.values)
        return value if method == "prefill" else Generated(value, value / 2)


def facts(writes=True, positions=64):
    return Facts("LlamaForCausalLM", 10, "float32", True, writes, positions, "cpu", 1)


def test_models_take_turns_and_the_first_rounds_do_not_count():
    asked, one, other = [], [9, 9, 9, 9, 1, 2, 3, 4], [9, 9, 9, 9, 2, 2, 3, 16]
    found = measured_rounds([Listed("a", asked, one), Listed("b", asked, other)], [facts(), facts()], WORK, repeats=2)
    assert found[0] == {"prefill_seconds": [1, 3], "first_token_seconds": [2, 4], "tokens_per_second": [1.0, 0.5]}
    assert found[1]["prefill_seconds"] == [2, 3]
    rounds = [asked[start : start + 4] for start in range(0, len(asked), 4)]
    assert len(rounds) == WARMUP + 2
    for number, (first, second, third, fourth) in enumerate(rounds):
        assert {first, second} == {("a", "prefill"), ("b", "prefill")}
        assert {third, fourth} == {("a", "generate"), ("b", "generate")}
        assert first[0] == "ab"[number % 2]  # who begins changes


def test_ratios_are_of_the_rounds():
    def row(values, bytes_):
        timed = Timing.of(values)
        return BenchRow("m", "C", 100 * bytes_, "float32", 4 * bytes_, timed, file_bytes=bytes_)

    first, second = row([1.0, 10.0, 4.0], 8), row([2.0, 11.0, 4.0], 2)
    ratios = second.beside(first).ratios
    assert ratios["prefill_seconds"] == median([2.0, 1.1, 1.0])  # and not 4 / 4
    assert (ratios["file_bytes"], ratios["parameters"]) == (0.25, 0.25)
    assert "zstd_bytes" not in ratios
    assert "tokens_per_second" not in ratios
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]).quartiles == (2.0, 4.0)
    assert Timing.of([3.0]).quartiles == (3.0, 3.0)


def test_the_prompt_is_as_long_as_all_of_them_take():
    names = ["a", "b"]
    assert _prompt_length(names, [facts(positions=None), facts(positions=2048)], None, 32) == 512
    assert _prompt_length(names, [facts(positions=64), facts(positions=2048)], None, 32) == 32
    assert _prompt_length(names, [facts(writes=False, positions=64)] * 2, None, 32) == 64
    with pytest.raises(ValueError, match="prompt_length=40 is more than b takes: 32, with new_tokens=32"):
        _prompt_length(names, [facts(positions=512), facts(positions=64)], 40, 32)
    with pytest.raises(ValueError, match="new_tokens=64 leaves no room for a prompt in a"):
        _prompt_length(names, [facts()] * 2, None, 64)


def test_a_worker_answers_and_hands_errors_back(tmp_path):
    cases.build("llama").save_pretrained(tmp_path / "model")
    asked = [
        ("load", (str(tmp_path / "model"),), {"dtype": torch.float64}),
        ("facts", (), {}),
        ("prefill", (WORK,), {}),
    ]
    out = io.BytesIO()
    serve(io.BytesIO(b"".join(pickle.dumps(one) for one in [*asked, ("load", ("/no/model",), {})])), out)
    out.seek(0)
    assert pickle.load(out) == (None, None)
    found, error = pickle.load(out)
    assert (found.cls, found.dtype, error) == ("LlamaForCausalLM", "float64", None)
    seconds, _ = pickle.load(out)
    assert seconds > 0
    _, error = pickle.load(out)
    assert isinstance(error, AttributeError | FileNotFoundError)


def test_a_worker_that_was_killed_is_named_with_its_exit_code(tmp_path, monkeypatch, capsys):
    """What it was asked is still to be sent when its pipes are closed."""
    start = subprocess.Popen

    def killed(_, **options):
        process = start(["false"], **options)
        process.wait()
        return process

    cases.build("llama").config.save_pretrained(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", killed)
    with pytest.raises(ChildProcessError, match="the process of mine ended with exit code 1"):
        Worker("mine", "load", "mine")
    assert main(["bench", str(tmp_path)]) == 1
    assert "gradprobe: error: the process of" in capsys.readouterr().err


def test_files_are_counted_and_compressed(tmp_path, monkeypatch):
    model = cases.build("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    save_file({"other": torch.zeros(1000)}, tmp_path / "other.safetensors")  # no part of the checkpoint
    files = checkpoint_files(tmp_path)
    assert len(files) > 1
    assert {file.name for file in files} == {file.name for file in tmp_path.glob("model*.safetensors")}
    monkeypatch.setattr(file_sizes, "_compressor", lambda: zlib.compressobj)
    content = [file.read_bytes() for file in files]
    assert FileSizes.of(files) == FileSizes(sum(map(len, content)), sum(len(zlib.compress(one)) for one in content))
    monkeypatch.setattr(file_sizes, "_compressor", lambda: None)
    assert FileSizes.of(files).zstd is None
    assert checkpoint_files(tmp_path / "none") == []


def test_zeros_are_seen_under_zstd(tmp_path):
    pytest.importorskip("zstandard")
    sizes = []
    for zeros in (0.0, 0.5):
        weights = torch.randn(512, 512)
        save_file({"w": weights.masked_fill(torch.rand(512, 512) < zeros, 0)}, tmp_path / "model.safetensors")
        sizes.append(FileSizes.of([tmp_path / "model.safetensors"]))
    assert sizes[0].stored == sizes[1].stored
    assert sizes[1].zstd < 0.7 * sizes[0].zstd


def test_zeros_are_seen_by_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("hf_xet")
    path, scratch, sizes = tmp_path / "model.safetensors", tmp_path / "scratch", []
    scratch.mkdir()
    for zeros in (0.0, 0.5):
        weights = torch.randn(512, 512).masked_fill(torch.rand(512, 512) < zeros, 0)
        save_file({"w": weights.bfloat16()}, path)
        assert FileSizes.of([path]).hub is None  # HF_HUB_DISABLE_XET, as all tests have it
        with monkeypatch.context() as patch:
            patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
            sizes.append(FileSizes.of([path], scratch))
            assert file_sizes._transferred([tmp_path / "none"], scratch) is None  # no error: a checkpoint is finished
            patch.setattr(file_sizes.shutil, "disk_usage", lambda _: SimpleNamespace(free=path.stat().st_size))
            assert FileSizes.of([path], scratch).hub is None
        assert list(scratch.iterdir()) == []
    dense, sparse = sizes
    assert 0.8 * dense.stored < dense.hub < dense.stored
    assert sparse.zstd is None or sparse.zstd < sparse.hub  # chunks of LZ4, not of zstd
    assert 0.6 * dense.stored < sparse.hub < 0.95 * dense.hub


def test_what_cannot_be_measured_is_refused_before_a_process_is_started(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.bench.worker.subprocess.Popen", lambda *_, **__: pytest.fail("started"))
    for models, options, message in (
        ([], {}, "models must be one or more"),
        ([cases.build("llama")], {}, "got a LlamaForCausalLM: save it first"),
        (["/no/model"], {}, "no such folder"),
        (["x/y"], {"repeats": 0}, "repeats must be a whole number >= 1"),
        (["x/y"], {"new_tokens": 1}, "new_tokens must be a whole number >= 2"),
        (["x/y"], {"dtype": "int4"}, "dtype must be"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            bench_pretrained(models, **options)


def pruned(config, folder=None, name="llama"):
    text = cases.batches("llama", rows=8)
    model = cases.build(name)
    return prune_pretrained(model, config, calibration=text, evaluation=text, output_dir=folder, progress=False)


def test_a_smaller_model_says_how_fast_it_is(in_this_process, tmp_path):
    result = pruned(GradProbeConfig(structure={"ffn": 8}, update="none", measure_speed=True), tmp_path / "made")
    dense, smaller = result.report.speed["rows"]
    sizes = result.report.structure["parameters"]
    assert [dense["parameters"], smaller["parameters"]] == [sizes["before"], sizes["after"]]
    assert smaller["file_bytes"] == 4 * sizes["after"]
    assert smaller["model"] == "8 FFN channels of every block"
    assert len(smaller["tokens_per_second"]["values"]) == 2
    card = (tmp_path / "made" / "README.md").read_text()
    ratio = smaller["ratios"]["tokens_per_second"]
    assert f"| tokens per second | {dense['tokens_per_second']['median']:,.1f} | " in card
    assert f"({ratio:.2f} x) |" in card
    assert "**Speed.** One text at a time, of which 62 tokens are read and 2 written" in card
    assert not (tmp_path / "made" / "assets" / "speed.png").exists()  # two points are no picture
    assert Report.load(tmp_path / "made").speed == result.report.speed


def test_shapes_that_were_tried_stand_in_a_picture(in_this_process, tmp_path, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.run.shapes.search.TRIED", 2)
    config = GradProbeConfig(structure="auto", params=0.95, update="none", measure_speed=True)
    report = pruned(config, tmp_path / "made").report
    tried = [one for one in report.structure["candidates"] if one["loss"] is not None]
    assert [row["parameters"] for row in report.speed["rows"]] == [
        report.structure["parameters"]["before"],
        *(one["parameters"] for one in tried),
    ]
    card = (tmp_path / "made" / "README.md").read_text()
    assert f"| nothing | {report.model['parameters']:,} | {report.structure['dense_loss']:.4f} | 1.00 x |" in card
    assert "![Loss against speed](assets/speed.png)" in card
    assert (tmp_path / "made" / "assets" / "speed.png").stat().st_size > 10_000


def test_a_whole_text_is_compared():
    def row(first, rates):
        times = {"first_token_seconds": {"values": first}, "tokens_per_second": {"values": rates}}
        return times | {"prefill_seconds": {"values": first}}

    rows = [row([2.0, 4.0, 2.0], [1.0, 1.0, 1.0]), row([1.0, 2.0, 2.0], [2.0, 2.0, 1.0])]
    assert times_as_fast({"rows": rows, "new_tokens": 5}, rows[1]) == 2.0  # 6/3, 8/4, 6/6
    for one in rows:
        one["tokens_per_second"] = None
    assert times_as_fast({"rows": rows, "new_tokens": 5}, rows[1]) == 2.0  # 2/1, 4/2, 1


def test_speed_that_cannot_be_measured_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.pruning.open_run", lambda *_, **__: pytest.fail("work began"))
    monkeypatch.setattr(LlamaForCausalLM, "__module__", "__main__")
    with pytest.raises(
        ValueError, match=r"measure_speed makes .* cannot import __main__.Llama.*: leave measure_speed out"
    ):
        pruned(GradProbeConfig(structure={"ffn": 8}, measure_speed=True))
    with pytest.raises(ValueError, match="measure_speed=True has no effect here: it belongs to structure"):
        GradProbeConfig(measure_speed=True)


def test_no_figure_is_cut_where_models_are_many(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    timing = Timing.of([1.2345] * 3)
    rows = [BenchRow(f"model-{n}", "Llama", 10**9 + n, "float32", 10**9, timing, timing, timing) for n in range(6)]
    print_bench(BenchResult([row.beside(rows[0]) for row in rows], 512, 32, 3, "cpu", 2, {}))
    said = capsys.readouterr().out
    assert "…" not in said
    assert [said.count(f"model-{n}") for n in range(6)] == [said.count("parameters"), 1, 1, 1, 1, 1]
    assert max(map(len, said.split("cpu,")[0].splitlines())) <= 80


def test_speed_that_fails_costs_no_result(monkeypatch, tmp_path, caplog):
    def fail(*_):
        raise RuntimeError("the process of dense ended with exit code -9")

    monkeypatch.setattr("gradprobe_hf.bench.of_shapes.started", fail)
    result = pruned(GradProbeConfig(structure={"ffn": 8}, update="none", measure_speed=True), tmp_path / "made")
    assert result.report.speed is None
    assert "speed was not measured: RuntimeError: the process of dense ended with exit code -9" in caplog.text
    assert (tmp_path / "made" / "model.safetensors").exists()


def test_another_release_of_the_hubs_client_costs_no_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(64)}, path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    other = ModuleType("hf_xet", "Without what this one has.")
    other.__spec__ = ModuleSpec("hf_xet", None)
    monkeypatch.setitem(sys.modules, "hf_xet", other)
    assert FileSizes.of([path]).hub is None


@pytest.mark.slow
def test_shapes_are_measured_by_processes_of_their_own():
    speed = pruned(GradProbeConfig(structure={"ffn": 8}, update="none", measure_speed=True)).report.speed
    assert speed["repeats"] == 10
    assert all(row["peak_memory_bytes"] > 0 for row in speed["rows"])


@pytest.mark.slow
def test_the_command_measures_two_checkpoints(tmp_path, capsys):
    for name in ("llama", "bert"):
        cases.build(name).save_pretrained(tmp_path / name)
    line = ["bench", str(tmp_path / "llama"), str(tmp_path / "bert"), "--repeats", "2", "--new-tokens", "3", "--quiet"]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    llama, bert = found["rows"]
    assert found["prompt_length"] == 61
    assert llama["file_bytes"] == (tmp_path / "llama" / "model.safetensors").stat().st_size
    assert llama["peak_memory_bytes"] > 0
    assert len(llama["tokens_per_second"]["values"]) == 2
    assert bert["tokens_per_second"] is None
    assert bert["ratios"]["parameters"] == bert["parameters"] / llama["parameters"]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "prefill of 61 tokens" in said
    assert "tokens per second" in said
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"damaged")
    assert main([*line, "--json"]) == 1
    assert "damaged" in capsys.readouterr().err


@pytest.mark.skipif(not MAPS.exists(), reason="no proc(5) says what is mapped")
def test_no_weight_stays_mapped_to_its_file(tmp_path):
    """Where one file is cached in other pieces than another, its passes take longer."""
    model = cases.build("tied")
    model.save_pretrained(tmp_path)
    subject = Subject.load(tmp_path)
    assert str(tmp_path) not in MAPS.read_text()
    assert subject.facts.parameters == model.num_parameters(), "tied weights are one"
    assert cases.changed(subject.model, model.state_dict()) == []


def test_files_are_those_of_the_subfolder(tmp_path, monkeypatch):
    @contextmanager
    def started(names, made_by):
        yield [Here(one) for one in made_by]

    monkeypatch.setattr("gradprobe_hf.bench.bench.started", started)
    cases.build("llama").save_pretrained(tmp_path / "sub")
    save_file({"weight": torch.ones(1000, 1000)}, tmp_path / "model.safetensors")
    found = bench_pretrained(tmp_path, subfolder="sub", prompt_length=4, new_tokens=2, repeats=1, progress=False)
    assert found.rows[0].file_bytes == (tmp_path / "sub" / "model.safetensors").stat().st_size


def test_adapters_are_measured_beside_other_models(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    made = []

    @contextmanager
    def started(names, made_by):
        made.extend(made_by)
        yield [Here(one) for one in made_by]

    monkeypatch.setattr("gradprobe_hf.bench.bench.started", started)
    cases.build("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    both = [tmp_path / "adapter", tmp_path / "base"]
    options = {"prompt_length": 4, "new_tokens": 2, "repeats": 1, "progress": False}
    found = bench_pretrained(both, merge_adapters=True, **options)
    assert found.rows[0].parameters == found.rows[1].parameters
    assert [options["merge_adapters"] for *_, options in made] == [True, False]
    with pytest.raises(ValueError, match=r"merge_adapters=True has no effect here: '.*/base' is no adapter"):
        bench_pretrained(tmp_path / "base", merge_adapters=True, **options)
    made.clear()
    with pytest.raises(ValueError, match="fold it in with merge_adapters=True"):
        bench_pretrained(both[::-1], **options)
    with pytest.raises(OSError, match="cannot load 'nobody/such'"):
        bench_pretrained([tmp_path / "base", "nobody/such"], **options)
    assert not made  # what is wrong with the second is found before the first is loaded


def test_what_opens_a_private_repository_is_used_before_it_is_loaded(monkeypatch):
    asked = []
    monkeypatch.setattr("gradprobe_hf.bench.bench.stored_adapter", lambda name, where: asked.append(where))
    where = {"token": "hf_x", "local_files_only": True}
    with pytest.raises(OSError, match="cannot load 'nobody/private'"):
        bench_pretrained("nobody/private", **where)
    assert asked == [where]


def test_files_of_a_subfolder_of_the_hub_are_those_that_were_fetched(tmp_path):
    snapshot = tmp_path / "models--x--y" / "snapshots" / "1234"
    cases.build("llama").save_pretrained(snapshot / "sub")
    (tmp_path / "models--x--y" / "refs").mkdir()
    (tmp_path / "models--x--y" / "refs" / "main").write_text("1234")
    sizes = _sizes("x/y", {"cache_dir": str(tmp_path), "subfolder": "sub"})
    assert sizes.stored == (snapshot / "sub" / "model.safetensors").stat().st_size
    assert _sizes("x/y", {"cache_dir": str(tmp_path), "subfolder": "other"}) is None
