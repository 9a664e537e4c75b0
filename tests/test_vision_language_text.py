"""Models that also see or hear, on text alone or beside some images: most language models released since 2025 do."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from datasets import Audio, Dataset, List, Value, Video

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.cli import main
from gradprobe_hf.data.unread_media import media_in
from gradprobe_hf.model.families import is_causal, objective
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from tests.architectures import (
    ARCHITECTURES,
    BEGIN_IMAGE,
    END_IMAGE,
    GEMMA4,
    GROUPED,
    IMAGE,
    LINEAR,
    byte_tokenizer,
    image,
)

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
SMALL = {"num_samples": 4, "sequence_length": 16}
# Its vision tower is small, as in released ones.
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 8,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN_IMAGE, "vision_end_token_id": END_IMAGE}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder with a tiny Qwen3.5, as its checkpoints are: with a vision tower and a tokenizer."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = hf.Qwen3_5Config(text_config={**GROUPED, **LINEAR}, vision_config=VISION, video_token_id=271, **TOKENS)
    model = hf.Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    generator = torch.Generator().manual_seed(0)
    words = [chr(97 + n) * 3 for n in torch.randint(26, (1200,), generator=generator).tolist()]
    (folder / "some.txt").write_text(" ".join(words[:600]))
    (folder / "others.txt").write_text(" ".join(words[600:]))
    return folder


def test_it_is_pruned_on_text_and_keeps_its_eyes(qwen, texts, tmp_path, capsys):
    result = prune_pretrained(
        qwen,
        GradProbeConfig(sparsity=0.5, **SMALL),
        calibration=texts / "some.txt",
        evaluation=texts / "others.txt",
        output_dir=tmp_path / "out",
        progress=False,
    )
    report = result.report
    assert report.sparsity == 0.5
    assert {one.block.split(".")[1] for one in report.matrices} == {"language_model"}
    assert {one.name.split(".")[1] for one in report.unreached} == {"visual"}
    assert report.evaluation["dense"]["perplexity"] > 1
    assert (report.evaluation["rows"], report.evaluation["term"]) == ("windows", "predicted tokens")
    assert any("The calibration is text alone, and a Qwen3_5ForConditionalGeneration" in w for w in report.warnings)
    assert "pipeline_tag: image-text-to-text" in (tmp_path / "out" / "README.md").read_text()
    dense, pruned = (hf.AutoModelForImageTextToText.from_pretrained(one) for one in (qwen, tmp_path / "out"))
    for name, weight in dense.model.visual.state_dict().items():
        assert torch.equal(pruned.model.visual.state_dict()[name], weight)
    capsys.readouterr()
    asked = [
        "evaluate",
        str(tmp_path / "out"),
        "--data",
        str(texts / "others.txt"),
        "--sequence-length",
        "16",
        "--json",
    ]
    assert main(asked) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["perplexity"] == pytest.approx(report.evaluation["pruned"]["perplexity"], rel=1e-4)


def test_it_writes_its_own_text(qwen):
    config = GradProbeConfig(sparsity=0.5, **SMALL)
    result = prune_pretrained(qwen, config, calibration="self", evaluation=False, progress=False)
    assert "sampled from the model" in result.report.calibration["protocol"]


def test_it_is_pruned_on_chats(qwen, texts, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    rows = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = GradProbeConfig(sparsity=0.5, **SMALL)
    chats = tmp_path / "chats.jsonl"
    result = prune_pretrained(
        qwen, config, calibration=chats, evaluation=False, processing_class=tokenizer, progress=False
    )
    assert "chat template" in result.report.calibration["protocol"]


def test_a_mixture_is_of_texts_without_images(qwen, texts, tmp_path):
    config = GradProbeConfig(sparsity=0.5, **SMALL)
    mixture = {str(texts / "some.txt"): 1, "self": 1}
    result = prune_pretrained(qwen, config, calibration=mixture, evaluation=False, progress=False)
    assert "sampled from the model" in result.report.calibration["protocol"]
    drawn = Dataset.from_list([{"image": image(), "text": f"Picture {n}."} for n in range(8)])
    drawn.to_parquet(tmp_path / "drawn.parquet")
    mixture = {str(texts / "some.txt"): 1, str(tmp_path / "drawn.parquet"): 1}
    with pytest.raises(ValueError, match=r"a mixture is of texts, and drawn\.parquet holds more than that"):
        prune_pretrained(qwen, config, calibration=mixture, evaluation=False, progress=False)


def test_it_is_recovered_on_text(qwen, texts, tmp_path):
    pruned = prune_pretrained(
        qwen, GradProbeConfig(sparsity=0.5, **SMALL), calibration=texts / "some.txt", evaluation=False, progress=False
    )
    recovered = recover_pretrained(
        pruned,
        str(qwen),
        RecoveryConfig(steps=2, sequence_length=16, num_samples=20),
        text=texts / "some.txt",
        evaluation=texts / "others.txt",
        progress=False,
    )
    assert recovered.report.evaluation["term"] == "predicted tokens"
    assert any("The recovery trained on text alone, and a Qwen" in warning for warning in recovered.report.warnings)
    assert recovered.report.sparsity == 0.5


def test_whole_structures_go_of_its_language_model_alone(qwen, texts, tmp_path, capsys):
    asked = ["prune", str(qwen), "--structure", "ffn=8", "--calibration", str(texts / "some.txt"), "--quiet"]
    asked += [
        "--num-samples",
        "4",
        "--sequence-length",
        "16",
        "--evaluation",
        "none",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(asked) != 0
    assert "its language model alone, loaded with --task text-generation" in capsys.readouterr().err
    assert main([*asked, "--task", "text-generation"]) == 0
    smaller = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert smaller.config.get_text_config().intermediate_size == 16
    assert "and will not be in the result: model.visual" in (tmp_path / "out" / "README.md").read_text()


def test_recordings_are_not_left_out_in_silence_where_a_model_sees_and_hears(texts, tmp_path):
    """Gemma 4 reads images with text here, and would be given the text of recordings alone."""
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16}
    vision = {**heads, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8}
    spoken = Dataset.from_list([{"voice": {"array": [0.1] * 9, "sampling_rate": 16000}, "text": "a word " * 9}] * 9)
    options = {"processing_class": byte_tokenizer(), "evaluation": False, "progress": False, "apply": False}
    config = GradProbeConfig(**SMALL, include=["model.language_model.layers.*"])
    for hears in (True, False):
        text = hf.Gemma4TextConfig(**GROUPED, **GEMMA4)
        towers = {"vision_config": vision, "audio_config": heads if hears else None}
        model = hf.Gemma4ForConditionalGeneration(hf.Gemma4Config(text_config=text, **towers)).eval()
        if hears:
            with pytest.raises(ValueError, match=r"audio \('voice'\), from which no batches.*out of the data"):
                prune_pretrained(model, config, calibration=spoken, **options)
            chat = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What is it?"}]}]
            recording = spoken[0]["voice"]
            spoken.to_parquet(tmp_path / "spoken.parquet")
            for other in (
                Dataset.from_list([{"voice": [recording, recording], "text": "a word " * 9}] * 9),
                Dataset.from_list([{"audio": "one.wav", "text": "a word " * 9}] * 9),
                Dataset.from_list([{"messages": chat}] * 9),
                {str(texts / "some.txt"): 1, str(tmp_path / "spoken.parquet"): 1},
            ):
                with pytest.raises(ValueError, match=r"audio .*from which no batches"):
                    prune_pretrained(model, config, calibration=other, **options)
        rows = spoken.remove_columns(["voice"]) if hears else spoken
        report = prune_pretrained(model, config, calibration=rows, **options).report
        assert report.calibration["rows"] == "windows"


def test_what_a_column_is_of_is_told_by_the_data_set_where_the_first_row_has_nothing():
    features = {"voice": Audio(), "parts": List(Audio()), "clip": Video(), "text": Value("string")}
    row = {"voice": None, "parts": None, "clip": None, "text": "a word"}
    assert media_in(row, features) == {"voice": "audio", "parts": "audio", "clip": "video"}
    assert media_in(row) == media_in({"speech": "We shall.", "numbers": [0.5, 1.5]}) == {}


@pytest.mark.parametrize("name", ["LLaVA", "SmolVLM", "Gemma 3 (vision)", "Voxtral"])
def test_the_loss_is_the_models_own_with_images_and_without(name):
    model, batch = BY_NAME[name].build(), BY_NAME[name].batches()[0]
    assert is_causal(model)
    text = {"input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 0)}
    for given, labels in ((batch, batch["labels"]), (text, text["input_ids"])):
        with torch.no_grad():
            loss, terms = summed_loss(model, given)
            own = model(**{**given, "labels": labels}).loss
        torch.testing.assert_close(loss / terms, own)
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        assert int(terms) == int((shifted != -100).sum())


def test_what_wants_its_medium_or_sees_ahead_is_none_of_these():
    with torch.device("meta"):
        for cls, config in (
            (hf.Blip2ForConditionalGeneration, hf.Blip2Config()),
            (hf.PaliGemmaForConditionalGeneration, hf.PaliGemmaConfig()),
            (hf.VoxtralRealtimeForConditionalGeneration, hf.VoxtralRealtimeConfig()),
        ):
            assert objective(cls._from_config(config)) != "ForCausalLM", cls


def test_images_of_some_rows_alone_are_told_apart(tmp_path):
    """Patches of all images may come one after the other, Qwen-VL's always do: such rows are read one by one."""
    llava = BY_NAME["LLaVA"]
    llava.save(tmp_path / "model")
    rows = [{"image": None if n == 2 else image(), "text": f"What is in picture {n}?"} for n in range(8)]
    result = prune_pretrained(
        tmp_path / "model",
        GradProbeConfig(sparsity=0.5, num_samples=8),
        calibration=Dataset.from_list(rows),
        evaluation=False,
        progress=False,
    )
    assert "8 images with text (image, text)" in result.report.calibration["protocol"]
    towers = {one.block.split(".")[1] for one in result.report.matrices}
    assert towers == {"vision_tower", "language_model"}, "both are pruned"
    assert not any("text alone" in warning for warning in result.report.warnings)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"order": "sequential"}, marks=pytest.mark.slow),
        pytest.param({"include": [r"re:vision_tower\.encoder\.layers\.[01]\."]}, marks=pytest.mark.slow),
        {"refinement": "blocks"},
    ],
    ids=["sequential", "the tower alone", "blocks"],
)
def test_a_text_without_an_image_says_nothing_of_the_tower_that_sees(options):
    """Whether it comes first or last of the batches."""
    llava, found = BY_NAME["LLaVA"], {}
    batches = llava.batches()
    ids = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(1))
    text = {"input_ids": ids, "labels": ids}
    config = GradProbeConfig(**{"sparsity": 0.5, "update": "none", **options})
    for name, given in (("first", [text, *batches]), ("last", [*batches, text]), ("without", batches)):
        model = llava.build()
        prune_pretrained(model, config, calibration=given, evaluation=False, progress=False)
        # LLaVA looks at what the block before the last makes.
        tower = [one for one in find_targets(model) if "vision_tower" in one.name and "layers.2" not in one.name]
        found[name] = {target.name: target.matrix(model).clone() for target in tower}
    for name, values in found["without"].items():
        assert (values == 0).any()
        if "include" in options:  # else the text has a part in what the whole budget leaves to the tower
            assert torch.equal(found["first"][name], values)
            assert torch.equal(found["last"][name], values)


def test_one_that_hears_is_pruned_on_text_and_of_recordings_takes_prepared_rows(texts, tmp_path):
    voxtral = BY_NAME["Voxtral"]
    voxtral.save(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    few = {"evaluation": False, "progress": False, "apply": False}
    include = {"include": ["model.language_model.layers.*"]}  # its tower is not small, as that of a released one is
    report = prune_pretrained(
        tmp_path / "model", GradProbeConfig(**SMALL, **include), calibration=texts / "some.txt", **few
    ).report
    assert (report.calibration["rows"], report.calibration["term"]) == ("windows", "predicted tokens")
    assert any("VoxtralForConditionalGeneration reads audio, too" in warning for warning in report.warnings)
    spoken = Dataset.from_list([{"audio": {"array": [0.1] * 9, "sampling_rate": 16000}, "text": "a word"}] * 9)
    with pytest.raises(ValueError, match="'audio', 'text', and for audio-text-to-text no batches are made"):
        prune_pretrained(tmp_path / "model", GradProbeConfig(), calibration=spoken, **few)
    batches = voxtral.batches()
    rows = {name: [row for batch in batches for row in batch[name].tolist()] for name in batches[0]}
    config = GradProbeConfig(num_samples=len(rows["labels"]))
    report = prune_pretrained(tmp_path / "model", config, calibration=Dataset.from_dict(rows), **few).report
    assert (report.calibration["rows"], report.unreached) == ("recordings with text", [])
    assert not any("text alone" in warning for warning in report.warnings)
