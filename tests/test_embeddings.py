"""Models that make embeddings: pooled as their files say, calibrated and measured by how far those move."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    AutoModel,
    AutoModelForTextEncoding,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    MixtralConfig,
    MixtralModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5EncoderModel,
    UMT5ForConditionalGeneration,
)

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.data.batches import from_rows, shared_rows, sketch
from gradprobe_hf.data.embedding_labels import SPREAD, with_embeddings
from gradprobe_hf.estimation.passes import cost_of_batch
from gradprobe_hf.estimation.watch import Watch
from gradprobe_hf.model.loading.checkpoint_class import chosen_class
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.loading.pooling import pooling_of
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.embeddings import DIRECTION, POOLING, embedded, is_for_embedding, pooling_weights
from gradprobe_hf.tasks.table import auto_classes, task_for, task_of_class
from tests import cases, labelled

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 260,
}
OPTIONS = {"sparsity": 0.5, "num_samples": 6, "sequence_length": 24, "batch_size": 3}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def encoder(dtype=torch.float32):
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES, max_position_embeddings=64)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # as initialised, all texts have nearly the same embedding
                parameter.mul_(10)
    return model


def saved(folder, model=None, pooling=None, architecture=None):
    """A checkpoint, with sentence-transformers' files where it has a pooling."""
    model = model or encoder()
    model.save_pretrained(folder)
    cases.tokenizer().save_pretrained(folder)
    if pooling is not None:
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        listed = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in modules]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if architecture is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return str(folder)


def rows(lengths=(9, 5, 7, 9), batch_size=4, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = [{"input_ids": torch.randint(4, 260, (length,), generator=generator)} for length in lengths]
    return from_rows(ids, batch_size, 0, source="rows", protocol="rows")


def embedding(model, ids, how="mean"):
    """Of one text without padding, restated."""
    hidden = model(input_ids=ids[None]).last_hidden_state[0]
    return F.normalize({"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[how], dim=0)


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_no_part_of_an_embedding(how, side):
    model, texts = encoder(torch.float64), [torch.tensor([7, 9, 11]), torch.tensor([5, 6, 7, 8, 9])]
    short = F.pad(texts[0], (0, 2) if side == "right" else (2, 0))
    mask = torch.tensor([[1, 1, 1, 0, 0] if side == "right" else [0, 0, 1, 1, 1], [1] * 5])
    places = (mask.cumsum(1) - 1).clamp_min(0)
    batch = {"input_ids": torch.stack([short, texts[1]]), "attention_mask": mask, "position_ids": places}
    found = embedded(model, {**batch, POOLING: pooling_weights(how, mask)})
    torch.testing.assert_close(found, torch.stack([embedding(model, text, how) for text in texts]))


def test_labels_to_measure_by_are_the_models_own_and_the_loss_is_how_far_they_moved():
    dense, pruned = encoder(torch.float64), encoder(torch.float64)
    with torch.no_grad():
        pruned.encoder.layer[0].intermediate.dense.weight.mul_(0.5)
    (batch,) = with_embeddings(rows(), dense, seed=0)
    assert summed_loss(dense, batch)[0] < 1e-12
    loss, terms = summed_loss(pruned, batch)
    texts = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    wanted = sum(1 - embedding(dense, text) @ embedding(pruned, text) for text in texts)
    torch.testing.assert_close(loss, wanted)
    assert terms == 4
    assert wanted > 0.01


def test_gradients_are_those_of_the_embedding_along_a_random_direction():
    model = encoder(torch.float64)
    (batch,) = with_embeddings(rows(), model, seed=5)
    weight = model.encoder.layer[1].attention.output.dense.weight
    loss, _ = summed_loss(model, batch)
    assert loss < 1e-12
    (found,) = torch.autograd.grad(loss, weight)
    assert batch[DIRECTION].std() == pytest.approx(SPREAD, rel=0.2)
    wanted = 0
    for ids, mask, along in zip(batch["input_ids"], batch["attention_mask"], batch[DIRECTION], strict=True):
        wanted = wanted + torch.autograd.grad(embedding(model, ids[mask.bool()]) @ along.double(), weight)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_labels_do_not_depend_on_how_rows_are_batched():
    whole, single = (with_embeddings(rows(batch_size=n), encoder(torch.float64), seed=1) for n in (4, 1))
    for name in ("labels", DIRECTION):
        assert torch.allclose(torch.cat([one[name] for one in whole]), torch.cat([one[name] for one in single]))


@pytest.mark.parametrize(
    ("pooling", "how"),
    [
        (MEAN, "mean"),
        (CLS, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
    ],
)
def test_pooling_is_what_the_files_say(pooling, how, tmp_path):
    name = saved(tmp_path, pooling=pooling)
    assert pooling_of(AutoModel.from_pretrained(name)) == how


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_max_tokens": True}, MEAN | CLS | {"pooling_mode_mean_tokens": True}]
)
def test_other_poolings_are_refused_before_any_work(pooling, text_file, tmp_path):
    name = saved(tmp_path / "model", pooling=pooling)
    with pytest.raises(ValueError, match=r"makes a text's embedding by pooling_mode_.*give a loss_fn"):
        prune_pretrained(name, GradProbeConfig(**OPTIONS), calibration=str(text_file), progress=False)


def test_texts_are_cut_where_sentence_transformers_cuts_them(text_file, tmp_path):
    name = saved(tmp_path, pooling=MEAN)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": False}))
    options = {name: value for name, value in OPTIONS.items() if name != "sequence_length"}
    for asked, length in ({}, 12), ({"sequence_length": 16}, 16):
        config = GradProbeConfig(**options, **asked)
        result = prune_pretrained(name, config, calibration=str(text_file), apply=False, progress=False)
        assert result.report.calibration["tokens"] == length * config.num_samples


@pytest.mark.parametrize("lowers", [True, False])
def test_capitals_that_the_model_never_sees_are_told(lowers, text_file, tmp_path):
    name = saved(tmp_path, pooling=MEAN)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": lowers}))
    given = {"calibration": str(text_file), "apply": False, "progress": False}
    told = prune_pretrained(name, GradProbeConfig(**OPTIONS), **given).report.warnings
    assert any("lower-cases every text" in one for one in told) is lowers


@pytest.mark.parametrize("as_subfolder", [True, False])
def test_a_module_without_the_others_is_refused(as_subfolder, text_file, tmp_path):
    """The pooling is in the folder above, in the layout that sentence-transformers wrote at first."""
    saved(tmp_path / "0_Transformer")
    listed = [{"path": path, "type": f"models.{path[2:]}"} for path in ("0_Transformer", "1_Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    name, where = (tmp_path, {"subfolder": "0_Transformer"}) if as_subfolder else (tmp_path / "0_Transformer", {})
    config, given = GradProbeConfig(**OPTIONS), {"calibration": str(text_file), "progress": False}
    with pytest.raises(ValueError, match=r"'0_Transformer' is one module of a sentence-transformers model.*save_pretr"):
        prune_pretrained(str(name), config, **given, **where)
    with pytest.raises(FileNotFoundError, match=r"no config\.json: sentence-transformers once wrote all modules"):
        prune_pretrained(str(tmp_path), config, **given)


@pytest.mark.parametrize("kind", ["CrossEncoder", "SentenceTransformer"])
def test_a_cross_encoder_is_none_that_embeds(kind, tmp_path, caplog):
    classifier = labelled.build("bert")
    classifier.config.num_labels = 1
    classifier.classifier = torch.nn.Linear(classifier.config.hidden_size, 1)
    name = saved(tmp_path / "model", classifier, pooling=MEAN)
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps({"model_type": kind}))
    pairs = Dataset.from_dict({"text": ["a b"] * 8, "text_pair": ["c d"] * 8, "label": [0.0, 1.0] * 4})
    report = prune_pretrained(
        name, GradProbeConfig(sparsity=0.5, num_samples=8), calibration=pairs, apply=False, progress=False
    ).report
    told = " ".join(report.warnings)
    assert ("cross-encoder of sentence-transformers with one label" in told) is (kind == "CrossEncoder")
    assert ("says that it makes embeddings" in told) is (kind == "SentenceTransformer")


def test_files_that_cannot_be_read_are_named(text_file, tmp_path):
    name = saved(tmp_path / "model", pooling=MEAN)
    (tmp_path / "model" / "modules.json").write_text("[{")
    with pytest.raises(ValueError, match=r"modules\.json, in which .* is no JSON"):
        prune_pretrained(name, GradProbeConfig(**OPTIONS), calibration=str(text_file), progress=False)


@pytest.mark.parametrize("placed", ["memory", pytest.param("disk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", [pytest.param("fast", marks=pytest.mark.slow), "best"])
def test_what_is_measured_is_what_the_checkpoint_computes(preset, placed, text_file, other_text_file, tmp_path):
    name, out = saved(tmp_path / "model", pooling=CLS), tmp_path / "out"
    arguments = ["prune", name, "--output", str(out), "--preset", preset, "--sparsity", "0.5", "--num-samples", "6"]
    arguments += ["--sequence-length", "24", "--calibration", str(text_file), "--evaluation", str(other_text_file)]
    assert main([*arguments, "--quiet", *(["--device-map", "disk"] if placed == "disk" else [])]) == 0
    report, dense, pruned = Report.load(out), AutoModel.from_pretrained(name), AutoModel.from_pretrained(out)
    inside = [one for name, one in pruned.named_parameters() if name.startswith("encoder.layer") and one.ndim == 2]
    assert report.zeros == report.weights // 2 == sum(int((one == 0).sum()) for one in inside)
    assert report.model["task"] == "feature-extraction"
    measured = report.evaluation
    assert (measured["dense"]["loss"], measured["metric"]["dense"]) == (0.0, pytest.approx(1.0))
    assert 0.001 < 1 - measured["metric"]["pruned"] == pytest.approx(measured["pruned"]["loss"], rel=1e-3)
    assert not report.in_nats
    text = cases.tokenizer()(other_text_file.read_text(), return_tensors="pt", add_special_tokens=False).input_ids[0]
    windows = text[: len(text) // 24 * 24].view(-1, 24)
    each = [1 - embedding(dense.eval(), one, "cls") @ embedding(pruned.eval(), one, "cls") for one in windows]
    assert min(each) < measured["pruned"]["loss"] < max(each)
    if len(windows) <= 20:
        assert measured["pruned"]["loss"] == pytest.approx(float(sum(each) / len(each)), rel=1e-3)
    card = (out / "README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card
    assert "| cosine to the embeddings before | 1.0000 |" in card
    assert (out / "1_Pooling" / "config.json").is_file()


def test_gradients_choose_better_than_chance(text_file, other_text_file):
    given = {"calibration": str(text_file), "evaluation": str(other_text_file), "processing_class": cases.tokenizer()}
    losses = {
        score: prune_pretrained(
            encoder(), GradProbeConfig(**OPTIONS, score=score), **given, progress=False
        ).report.evaluation["pruned"]["loss"]
        for score in ("fisher", "random")
    }
    assert losses["fisher"] < 0.8 * losses["random"]


def test_a_decoder_without_its_head_is_measured_on_the_manual_by_default():
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**SIZES, max_position_embeddings=64))
    result = prune_pretrained(model, GradProbeConfig(**OPTIONS), processing_class=cases.tokenizer(), progress=False)
    assert result.report.evaluation["source"].startswith("pydoc (evaluation part)")
    assert result.report.evaluation["protocol"].endswith("the loss is 1 - cos to the dense model's")


def test_what_nobody_asked_to_measure_is_left_out_where_it_cannot_be(tmp_path):
    name = saved(tmp_path, pooling={"pooling_mode_max_tokens": True})
    result = prune_pretrained(name, GradProbeConfig(sparsity=0.5, score="magnitude"), progress=False)
    assert result.report.evaluation is None


def test_a_method_that_takes_no_loss_makes_no_embeddings_to_calibrate(text_file, tmp_path):
    name = saved(tmp_path, pooling={"pooling_mode_max_tokens": True})
    given = {"calibration": str(text_file), "evaluation": False, "progress": False}
    report = prune_pretrained(name, GradProbeConfig(**OPTIONS, score="wanda"), **given).report
    assert "embedding" not in report.calibration["protocol"]


def test_a_masked_language_model_is_measured_there_too():
    result = prune_pretrained(
        cases.build("bert"), GradProbeConfig(**OPTIONS), processing_class=labelled.tokenizer(), progress=False
    )
    assert result.report.evaluation["source"].startswith("pydoc (evaluation part)")
    assert "masked" in result.report.evaluation["protocol"]


def test_a_loss_of_the_users_own_is_called_with_the_text_alone(text_file):
    names = set()

    def loss(model, batch):
        names.update(batch)
        return model(**batch).pooler_output.square().sum()

    given = {"calibration": str(text_file), "evaluation": str(text_file), "processing_class": cases.tokenizer()}
    prune_pretrained(encoder(), GradProbeConfig(**OPTIONS), **given, loss_fn=loss, progress=False)
    assert names == {"input_ids"}


def test_evaluate_measures_beside_the_dense_model_and_not_alone(text_file, other_text_file, tmp_path, capsys):
    name, out = saved(tmp_path / "model"), tmp_path / "out"
    result = prune_pretrained(
        name, GradProbeConfig(**OPTIONS), calibration=str(text_file), evaluation=str(other_text_file), progress=False
    )
    result.save_pretrained(out)
    asked = [
        "evaluate",
        str(out),
        "--data",
        str(other_text_file),
        "--sequence-length",
        "24",
        "--batch-size",
        "3",
        "--json",
        "--quiet",
    ]
    assert main([*asked, "--against", name]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-4)
    assert found["metric"]["pruned"] == pytest.approx(result.report.evaluation["metric"]["pruned"], rel=1e-4)
    assert main(asked) == 1
    assert "name the dense model with --against" in " ".join(capsys.readouterr().err.split())


def test_what_makes_embeddings_and_is_stored_as_a_language_model_is_told(text_file, tmp_path, caplog):
    given = {"calibration": str(text_file), "evaluation": False, "progress": False}
    name = saved(tmp_path / "whole", cases.build("llama"), MEAN)
    with caplog.at_level(logging.WARNING):
        prune_pretrained(name, GradProbeConfig(**OPTIONS), **given)
    assert "says that it makes embeddings, and it is pruned for text-generation" in caplog.text
    result = prune_pretrained(name, GradProbeConfig(**OPTIONS, task="feature-extraction"), **given)
    assert type(result.model) is LlamaModel
    bare = saved(tmp_path / "bare", pooling=MEAN, architecture="BertForMaskedLM")
    with pytest.raises(ValueError, match="makes embeddings: load it with task='feature-extraction'"):
        prune_pretrained(bare, GradProbeConfig(**OPTIONS), **given)


def test_a_recovery_is_refused_with_what_can_be_done(text_file, tmp_path):
    dense, options = (
        encoder(),
        {"calibration": str(text_file), "processing_class": cases.tokenizer(), "progress": False},
    )
    with pytest.raises(ValueError, match="recovery_steps=5 compares predictions of one token or class"):
        prune_pretrained(encoder(), GradProbeConfig(**OPTIONS, recovery_steps=5), **options)
    pruned = prune_pretrained(encoder(), GradProbeConfig(**OPTIONS), **options).model
    with pytest.raises(ValueError, match=r"a BertModel makes others\. Fine-tune it"):
        recover_pretrained(pruned, dense, RecoveryConfig(steps=2), text=str(text_file), progress=False)


def test_only_models_that_read_text_are_for_it():
    assert task_of_class("BertModel").name == task_of_class("Qwen3Model").name == "feature-extraction"
    assert task_of_class("BartModel", is_encoder_decoder=True) is None
    assert task_of_class("T5EncoderModel").name == "feature-extraction"
    assert task_of_class("OwnForecastModel") is None
    assert task_for("feature-extraction", "OwnTextModel").embeds
    for name in ("GPT2LMHeadModel", "BertForMaskedLM"):
        with pytest.raises(ValueError, match="task='feature-extraction' is for models of AutoModel"):
            task_for("feature-extraction", name)
    with pytest.raises(ValueError, match=r"and this is a ViTModel \(image-feature-extraction\)"):
        task_for("feature-extraction", "ViTModel")


@pytest.mark.parametrize(
    ("whole_class", "encoder_class", "config_class"),
    [
        (T5ForConditionalGeneration, T5EncoderModel, T5Config),
        (UMT5ForConditionalGeneration, UMT5EncoderModel, UMT5Config),  # whose encoder says that it has a decoder
    ],
)
def test_of_an_encoder_decoder_it_is_the_encoder(
    whole_class, encoder_class, config_class, text_file, other_text_file, tmp_path, capsys
):
    """Saved as that alone, or taken from the whole of it."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 260}
    whole = whole_class(config_class(**sizes, decoder_start_token_id=0))
    alone = encoder_class(copy.deepcopy(whole.config))  # it says there that it has no decoder
    alone.load_state_dict(whole.state_dict(), strict=False)
    names = {"whole": saved(tmp_path / "whole", whole), "alone": saved(tmp_path / "alone", alone)}
    given, reports = {"calibration": str(text_file), "evaluation": str(other_text_file), "progress": False}, []
    for kind, task in (("alone", None), ("whole", "feature-extraction")):
        result = prune_pretrained(names[kind], GradProbeConfig(**OPTIONS, task=task), **given)
        assert type(result.model) is encoder_class
        result.save_pretrained(tmp_path / "out", overwrite=True)
        loaded = AutoModelForTextEncoding.from_pretrained(tmp_path / "out")
        assert all(torch.equal(one, result.model.state_dict()[name]) for name, one in loaded.state_dict().items())
        reports.append(result.report.evaluation["metric"]["pruned"])
    assert reports[0] == reports[1] < 0.9999
    asked = ["evaluate", str(tmp_path / "out"), "--data", str(other_text_file), "--sequence-length", "24", "--json"]
    assert main([*asked, "--against", names["whole"], "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"]["pruned"] == pytest.approx(reports[1], rel=1e-3)
    assert "AutoModelForTextEncoding" in (tmp_path / "out" / "README.md").read_text()
    again = GradProbeConfig(**{**OPTIONS, "sparsity": 0.7})
    assert prune_pretrained(str(tmp_path / "out"), again, **given).report.sparsity == pytest.approx(0.7, abs=1e-3)


def test_any_other_is_loaded_by_the_class_that_knows_its_own_code():
    embeds = auto_classes("feature-extraction")
    assert chosen_class(BertConfig(), embeds) is chosen_class(LlamaConfig(), embeds) is AutoModel
    assert chosen_class(T5Config(), embeds) is AutoModelForTextEncoding
    stored = T5Config(architectures=["T5EncoderModel"], is_encoder_decoder=False)
    assert chosen_class(stored, embeds) is AutoModelForTextEncoding


def test_the_card_loads_it_by_a_class_that_knows_it(text_file, tmp_path):
    model = LlamaModel(LlamaConfig(**SIZES, max_position_embeddings=64))
    given = {"calibration": str(text_file), "evaluation": False, "processing_class": cases.tokenizer()}
    prune_pretrained(model, GradProbeConfig(**OPTIONS), **given, progress=False).save_pretrained(tmp_path / "out")
    assert 'pipeline("feature-extraction"' in (tmp_path / "out" / "README.md").read_text()


def test_embeddings_as_wide_as_a_text_is_long_are_not_taken_for_its_tokens():
    model, texts = (
        BertModel(BertConfig(**{**SIZES, "hidden_size": 40}, max_position_embeddings=64)).eval(),
        rows((40,) * 4),
    )
    found = with_embeddings(texts, model, seed=0)
    assert sketch(found) == sketch(texts)
    assert len(sketch(found)) > 4
    assert shared_rows(found, with_embeddings(rows((40,) * 4, seed=9), model, seed=0)) == 0
    torch.manual_seed(0)
    config = MixtralConfig(
        **{**SIZES, "hidden_size": 24, "intermediate_size": 16},
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    padded = with_embeddings(rows((24, 12, 7, 24)), MixtralModel(config).eval(), seed=0)
    result = cases.prune(MixtralModel(config).eval(), padded.items, sparsity=0.5, probes=1)
    assert result.report.zeros == result.report.weights // 2


def test_whatever_a_device_makes_of_embeddings_the_text_is_the_same():
    """Or a run could not be resumed on another one."""
    first, second = (with_embeddings(rows(), encoder(), seed=0) for _ in range(2))
    second.items[0]["labels"] += 1e-7
    assert first.fingerprint == second.fingerprint == rows().fingerprint
    assert first.fingerprint != with_embeddings(rows(seed=9), encoder(), seed=0).fingerprint


def test_inputs_of_a_model_may_have_any_name():
    assert not is_for_embedding({"input_ids": torch.ones(2, 3), "direction": torch.ones(2), "pooling": torch.ones(2)})


def test_its_passes_are_estimated_as_they_are():
    model = skeleton(encoder().config, BertModel)
    found = cost_of_batch(model, find_targets(model), 4, 9, device=torch.device("cpu"))
    real = encoder()
    (batch,) = with_embeddings(rows((9, 9, 9, 9)), real, seed=0)
    with Watch([*real.parameters(), *real.buffers(), *batch.values()]) as watch:
        summed_loss(real, batch)[0].backward()
    assert found.simulated
    assert found.flops == pytest.approx(watch.flops, rel=0.1)
