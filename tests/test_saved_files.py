"""What a saved folder is made of: what may be replaced, where it is, and what of the source is kept."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForCausalLM, ViTImageProcessor, Wav2Vec2Config, Wav2Vec2FeatureExtractor

from gradprobe_hf import GradProbeConfig, RecoveryConfig, compare_pretrained, prune_pretrained, recover_pretrained
from gradprobe_hf.checkpoint import file_sizes
from gradprobe_hf.checkpoint.companions import copy_companions
from gradprobe_hf.checkpoint.origin import stored_report
from gradprobe_hf.checkpoint.push import check_not_read
from gradprobe_hf.checkpoint.replacing import replacing
from gradprobe_hf.checkpoint.write import check_destination, check_writable
from gradprobe_hf.cli.main import main
from gradprobe_hf.cli.verbs import compare
from gradprobe_hf.model.loading import stored_files
from gradprobe_hf.model.loading.load import load, load_config, skeleton
from gradprobe_hf.model.loading.pooling import pooling_of
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.report.card.base_model import base_metadata, bases
from gradprobe_hf.report.report import Report
from tests import cases

QUICK = GradProbeConfig(score="magnitude")
MEASURED = GradProbeConfig(num_samples=4, sequence_length=16, evaluation_samples=4)


def prune(source, config=QUICK, **options):
    return prune_pretrained(
        source, config, calibration=cases.batches("llama"), evaluation=False, progress=False, **options
    )


@pytest.fixture
def source(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "source"))


@pytest.fixture
def home(source, tmp_path, monkeypatch):
    """A home folder with a model in it, and another folder to stand in."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    source.rename(tmp_path / "home" / "model")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert not list((tmp_path / "here").iterdir()), "no folder is called ~"


@pytest.mark.parametrize(
    "mine",
    [
        "my_chats.json",
        "train.py",
        "assets/mylogo.svg",
        "assets/raw/data.txt",
        "model-backup.safetensors",
        "notes.jinja",
        "mine.model",
        "additional_chat_templates/notes.txt",
    ],
)
def test_what_is_somebodys_own_is_not_deleted(mine, source):
    check_destination(source, "", overwrite=True)
    (source / mine).parent.mkdir(exist_ok=True, parents=True)
    (source / mine).write_text("mine")
    named = "assets/raw" if "raw" in mine else mine
    with pytest.raises(FileExistsError, match=f"holds {re.escape(named)}, which is no part of a checkpoint"):
        check_destination(source, "", overwrite=True)
    with pytest.raises(FileExistsError):
        prune(cases.build("llama"), output_dir=source, overwrite=True)
    assert (source / mine).read_text() == "mine"


def test_every_file_that_transformers_writes_may_be_replaced(source):
    """Those of tokenizers as their classes name them."""
    root = Path(transformers.__file__).parent
    named = re.compile(r'"([\w.-]+\.(?:json|txt|model|spm|jinja|tokenizer|codes))"')
    files = {one for path in root.glob("models/*/tokenization_*.py") for one in named.findall(path.read_text())}
    files -= {"speaker_embeddings_path.json"}  # of Bark, beside a folder of arrays
    assert len(files) > 20
    files |= {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.fp16.safetensors"}
    files |= {"adapter_config.json", "adapter_model.safetensors", "gradprobe_config.json", "gradprobe_report.json"}
    files |= {"chat_template.jinja", "additional_chat_templates/tools.jinja", "training_args.bin", "LICENSE"}
    files |= {"preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "README.md"}
    for file in files:
        (source / file).parent.mkdir(exist_ok=True)
        (source / file).touch()
    check_destination(source, "", overwrite=True)


def test_code_is_part_of_a_checkpoint_that_names_it(source):
    (source / "modeling_own.py").write_text("from .layers_own import Layer\nfrom .not_there import Other\n")
    (source / "layers_own.py").write_text("import torch\n")
    (source / "tokens_own.py").touch()
    with pytest.raises(FileExistsError, match=r"layers_own\.py"):
        check_destination(source, "", overwrite=True)
    for file, named in (
        ("config.json", {"AutoModelForCausalLM": "me/model--modeling_own.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "tokens_own.Tokens"]}),
    ):
        values = json.loads((source / file).read_text())
        (source / file).write_text(json.dumps(values | {"auto_map": named}))
    check_destination(source, "", overwrite=True)
    (source / "train.py").write_text("from .modeling_own import Model\n")
    with pytest.raises(FileExistsError, match=r"train\.py"):
        check_destination(source, "", overwrite=True)


@pytest.mark.parametrize("there", [True, False])
def test_behind_a_link_the_folder_is_replaced(there, source, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    link = tmp_path / "link"
    link.symlink_to(disk / "folder")
    if there:
        source.rename(disk / "folder")
    prune(cases.build("llama"), output_dir=link, overwrite=there)
    assert link.is_symlink()
    assert (disk / "folder" / "gradprobe_report.json").is_file()
    assert [path.name for path in disk.iterdir()] == ["folder"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_mount_point_is_refused_with_a_folder_in_it(overwrite, tmp_path, monkeypatch):
    """It cannot be renamed, not even an empty one."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "disk"))
    for name in ("disk", "link"):
        with pytest.raises(ValueError, match=rf"{name}' \(--output\) is a mount point.*{name}/model'"):
            check_destination(tmp_path / name, "", overwrite)
        check_destination(tmp_path / name / "model", "", overwrite)


@pytest.mark.skipif(os.geteuid() != 0, reason="binding a folder needs root")
def test_so_is_a_folder_of_the_same_disk_that_is_bound_there(source, tmp_path):
    (tmp_path / "bound").mkdir()
    found = subprocess.run(["mount", "--bind", source, tmp_path / "bound"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"this machine binds no folders: {found.stderr.decode().strip()}")
    try:
        with pytest.raises(ValueError, match="is a mount point"):
            check_destination(tmp_path / "bound", "", overwrite=True)
    finally:
        subprocess.run(["umount", tmp_path / "bound"], check=True)


def test_a_model_in_the_home_folder_is_found_by_all_that_load_one(home):
    assert load("~/model").model.name_or_path == str(home / "model")
    assert load_config("~/model").model_type == "llama"
    with pytest.raises(FileNotFoundError, match="'~/nothing'"):
        load("~/nothing")


def test_home_is_meant_by_its_sign(home):
    prune("~/model", MEASURED, output_dir="~/pruned", resume_dir="~/state")
    assert (home / "pruned" / "model.safetensors").is_file()
    prune("~/model", offload_folder="~/offloaded", device_map="disk")
    assert (home / "offloaded").is_dir()
    prune(Path("~/model")).save_pretrained(Path("~/again"))
    assert (home / "again" / "model.safetensors").is_file()
    with pytest.raises(FileNotFoundError, match="~/not/there"):
        prune("~/not/there")
    with pytest.raises(ValueError, match="is a model that is read"):
        prune("~/model", output_dir=home / "model", overwrite=True)


def test_home_is_meant_by_its_sign_in_a_recovery(home, text_file):
    prune("~/model", output_dir="~/pruned")
    config = RecoveryConfig(steps=1, batch_size=1, sequence_length=16)
    given = {"text": str(text_file), "evaluation": False, "progress": False}
    recover_pretrained("~/pruned", "~/model", config, **given, output_dir="~/recovered", resume_dir="~/training")
    assert (home / "recovered" / "model.safetensors").is_file()


def test_home_is_meant_by_its_sign_in_a_comparison(home, text_file, capsys):
    found = compare_pretrained(
        Path("~/model"),
        MEASURED,
        {"wanda": MEASURED.varied(score="wanda", probes=0)},
        calibration=str(text_file),
        evaluation="pydoc",
        progress=False,
    )
    found.save("~/compared")
    assert (home / "compared" / "comparison.json").is_file()
    assert main(["compare", "~/model", "--output=~/compared"]) == 1
    assert f"{home}/compared/comparison.json exists" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["/proc/compared", "plain.txt/compared/again"])
def test_a_comparison_that_cannot_be_written_is_refused_before_anything_is_loaded(
    where, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compare, "compare_pretrained", lambda *_, **__: pytest.fail("it began"))
    monkeypatch.chdir(tmp_path)
    Path("plain.txt").touch()
    assert main(["compare", str(checkpoint), "--output", where]) == 1
    said = capsys.readouterr().err
    assert where in said
    assert "is a file; choose another folder" in said or "nothing can be written into /proc" in said
    assert [path.name for path in tmp_path.iterdir()] == ["plain.txt"]


def test_a_folder_that_can_be_written_stays_as_it_was(tmp_path):
    check_writable(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_reads_images_is_saved_with_a_tokenizer_alone(source, tmp_path, caplog):
    """As of a vision encoder with a text decoder, for which transformers has no processor."""
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(source)
    saved = tmp_path / "saved"
    with caplog.at_level(logging.WARNING):
        prune(source, output_dir=saved)
    assert "preprocessor_config.json of" in caplog.text
    assert "no processor for it. Its tokenizer alone is loaded" in caplog.text
    assert (saved / "preprocessor_config.json").read_bytes() == (source / "preprocessor_config.json").read_bytes()
    prune(saved, output_dir=source, overwrite=True)
    assert ViTImageProcessor.from_pretrained(source).size["height"] == 8


def test_a_processor_that_cannot_be_loaded_is_named_with_the_reason(source, tmp_path, caplog):
    (source / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    assert load_processing_class(cases.build("llama"), str(source)) is not None
    assert not caplog.text, "nobody knows what belongs to a model in memory"
    prune(source, output_dir=tmp_path / "saved")
    assert "processor_config.json of" in caplog.text
    assert re.search(r"image processor.*Its tokenizer alone is loaded", caplog.text, re.DOTALL | re.IGNORECASE)
    assert (tmp_path / "saved" / "processor_config.json").is_file()


def test_a_processor_whose_code_was_not_loaded_is_not_half_kept(source, tmp_path, caplog):
    named = {"auto_map": {"AutoImageProcessor": "images_own.Reader"}}
    (source / "preprocessor_config.json").write_text(json.dumps(named))
    prune(source, output_dir=tmp_path / "saved")
    assert not (tmp_path / "saved" / "preprocessor_config.json").exists()
    assert "is not in the checkpoint: its code, images_own.py, was not loaded" in caplog.text


def test_nothing_is_said_of_a_model_of_text(source, tmp_path, caplog):
    prune(source, output_dir=tmp_path / "saved")
    assert "processor" not in caplog.text


COMPANIONS = (
    "LICENSE",
    "LICENSE-MODEL.md",
    "NOTICE.txt",
    "USE_POLICY.md",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/model.safetensors",
)


def with_companions(folder):
    for name in (*COMPANIONS, "notes.txt", "onnx/model.onnx", "onnx/config.json", "0_raw/table.csv"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{name} of the dense model")


def test_a_licence_and_the_modules_of_an_embedding_go_with_the_weights(source, tmp_path):
    with_companions(source)
    saved, again = tmp_path / "saved", tmp_path / "again"
    prune(source, output_dir=saved)
    files = {path.relative_to(saved).as_posix() for path in saved.glob("**/*") if path.is_file()}
    assert {name for name in files if (saved / name).read_text("latin-1").endswith("of the dense model")} == {
        *COMPANIONS
    }
    prune(saved, output_dir=again)
    assert (again / "2_Dense" / "model.safetensors").read_text() == "2_Dense/model.safetensors of the dense model"
    prune(source, output_dir=saved, overwrite=True)
    (saved / "1_Pooling" / "mine.txt").touch()
    with pytest.raises(FileExistsError, match=r"holds 1_Pooling/mine\.txt"):
        prune(source, output_dir=saved, overwrite=True)


def with_modules(folder):
    """A model of sentence-transformers with names and code of its own, as jina-embeddings are."""
    listed = [
        ("", "custom_st.Transformer"),
        ("pooling/", "sentence_transformers.models.Pooling"),
        ("2_LSTM", "sentence_transformers.models.LSTM"),
        ("own", "mine.Own"),
        ("in/side", "sentence_transformers.models.Normalize"),
    ]
    modules = [{"path": path, "type": kind} for path, kind in listed]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "custom_st.py").write_text("from .inner import one\n")
    for name in (
        *OF_MODULES - {"custom_st.py"},
        "unrelated.py",
        "own/table.csv",
        "other/config.json",
        "in/side/config.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


OF_MODULES = {"custom_st.py", "inner.py", "mine.py", "pooling/config.json", "2_LSTM/lstm_config.json", "own/idf.json"}


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.glob("**/*") if path.is_file()}


@pytest.mark.parametrize("is_folder", [True, False], ids=["a folder", "the Hub"])
def test_modules_with_names_and_code_of_their_own_go_along(is_folder, source, tmp_path, monkeypatch, caplog):
    """Without one of these files sentence-transformers does not load the result."""
    with_modules(source)
    saved = tmp_path / "saved"
    if is_folder:
        prune(source, output_dir=saved)
    else:
        saved.mkdir()
        copy_companions(saved, on_the_hub(source, monkeypatch, tmp_path / "downloaded"))
    assert files_in(saved) >= OF_MODULES
    assert not files_in(saved) & {"unrelated.py", "other/config.json", "own/table.csv", "in/side/config.json"}
    assert "modules that are not copied: in/side/config.json, own/table.csv" in caplog.text
    if is_folder:
        prune(source, output_dir=saved, overwrite=True)


def on_the_hub(source, monkeypatch, downloaded):
    """A model as if it were from a repository with the files of a folder: what is asked for is downloaded."""
    model = cases.build("llama")
    model.name_or_path = model.config._name_or_path = "user/model"
    model.config._commit_hash = "abc"

    def info(self, name, revision, timeout):
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files_in(source)])

    def cached(name, file, revision, **_):
        if not (source / file).is_file():
            return None
        (downloaded / file).parent.mkdir(parents=True, exist_ok=True)
        return shutil.copyfile(source / file, downloaded / file)

    monkeypatch.setattr(HfApi, "model_info", info)
    monkeypatch.setattr(stored_files, "cached_file", cached)
    return model


@pytest.mark.parametrize("is_encoder", [True, False])
def test_the_card_of_a_sentence_encoder_says_how_it_is_used(is_encoder, source, tmp_path):
    use = {"library_name": "sentence-transformers", "pipeline_tag": "sentence-similarity", "tags": ["mteb", "pruning"]}
    ModelCard(f"---\n{json.dumps(use)}\n---\n").save(source / "README.md")
    if is_encoder:
        (source / "modules.json").write_text("[]")
    prune(source, output_dir=tmp_path / "saved")
    card = ModelCard.load(tmp_path / "saved" / "README.md").data
    kept = ["mteb", "pruning", "gradprobe"] if is_encoder else ["gradprobe", "pruning"]
    assert card.library_name == ("sentence-transformers" if is_encoder else "transformers")
    assert card.pipeline_tag == ("sentence-similarity" if is_encoder else "text-generation")
    assert card.tags == [*kept, "sparse"]


def test_what_is_left_of_compressed_files_is_told_beside_the_dense_ones(source, tmp_path, monkeypatch):
    """A dense file can be compressed as well: what zeros save is the difference to that."""
    monkeypatch.setattr(file_sizes, "_compressor", lambda: zlib.compressobj)
    dense = len(zlib.compress((source / "model.safetensors").read_bytes()))
    made = prune(str(source), output_dir=tmp_path / "made").report.files
    assert (made["dense_zstd"], made["dense_hub"]) == (dense, None)  # HF_HUB_DISABLE_XET, as all tests have it
    assert made["zstd"] < dense < made["dense"]
    row = f"| weights on the disk, MB | {made['dense'] / 1e6:,.1f} ({dense / 1e6:,.1f} under zstd) |"
    assert row in (tmp_path / "made" / "README.md").read_text()
    # Another type than is stored, and a model that somebody may have trained since.
    narrow = prune(str(source), dtype="bfloat16", output_dir=tmp_path / "narrow").report.files
    own = AutoModelForCausalLM.from_pretrained(source)
    trained = prune(own, processing_class=cases.tokenizer(), output_dir=tmp_path / "trained").report.files
    # Of a model that was pruned in memory the files are those of before.
    half = prune(str(source))
    again = prune(half.model, processing_class=cases.tokenizer(), output_dir=tmp_path / "again").report.files
    for files in (narrow, trained, again):
        assert files["zstd"] is not None
        assert files["dense_zstd"] is None


def test_a_report_says_that_no_tokenizer_was_saved(source, tmp_path):
    said = "No tokenizer or processor was found for source, and a checkpoint that is written has none"
    assert not any(said in warning for warning in prune(source).report.warnings)
    for file in source.glob("*token*"):
        file.unlink()
    prune(source, output_dir=tmp_path / "out")
    assert said in (tmp_path / "out" / "README.md").read_text()
    assert any(said in warning for warning in Report.load(tmp_path / "out").warnings)


def test_what_hears_without_a_tokenizer_is_taken(tmp_path, caplog):
    Wav2Vec2Config().save_pretrained(tmp_path)
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    found = load_processing_class(cases.build("llama"), str(tmp_path))
    assert isinstance(found, Wav2Vec2FeatureExtractor)
    assert "no tokenizer" not in caplog.text


def test_companions_on_the_hub_are_those_of_the_commit_that_was_loaded(source, tmp_path, monkeypatch, caplog):
    with_companions(source)
    model = cases.build("llama")
    model.name_or_path = model.config._name_or_path = "user/model"
    model.config._commit_hash = "abc"
    asked = []

    def info(self, name, revision, timeout):
        asked.append((name, revision))
        if len(asked) > 1:
            raise OSError("nobody answers")
        files = [path.relative_to(source).as_posix() for path in source.glob("**/*") if path.is_file()]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])

    def cached(name, file, revision, **_):
        assert (name, revision) == ("user/model", "abc")
        return str(source / file)

    monkeypatch.setattr(HfApi, "model_info", info)
    monkeypatch.setattr(stored_files, "cached_file", cached)
    for folder, found in (("first", {*COMPANIONS}), ("second", set())):
        (tmp_path / folder).mkdir()
        copy_companions(tmp_path / folder, model)
        there = (path for path in (tmp_path / folder).glob("**/*") if path.is_file())
        assert {path.relative_to(tmp_path / folder).as_posix() for path in there} == found
    assert asked == [("user/model", "abc")] * 2
    assert "whether user/model has a licence" in caplog.text


def test_the_commit_in_the_cache_is_known_where_transformers_does_not_tell_it(tmp_path, monkeypatch):
    """transformers 5.23 sets no `_commit_hash` any more, and without one nobody's licence or pooling were found."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--user--model"
    snapshot = repository / "snapshots" / commit
    cases.build("llama").save_pretrained(snapshot)
    with_companions(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = load("user/model", cache_dir=str(tmp_path)).model
    assert stored_files.loaded_commit(model) == commit
    assert "_commit_hash" not in model.config.to_dict()
    del model.config._commit_hash
    assert stored_files.cached_commit("user/model", cache_dir=str(tmp_path)) == commit
    assert stored_files.cached_commit("user/other", cache_dir=str(tmp_path)) is None


@pytest.mark.parametrize("subfolder", ["", "encoder"])
def test_what_is_beside_a_model_is_found_where_it_was_loaded_from(subfolder, tmp_path, monkeypatch):
    """In another cache, a subfolder, and without the Hub: pooling was the mean, and no licence or card was found."""
    commit, repository = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--user--model"
    snapshot = repository / "snapshots" / commit
    inside = snapshot / subfolder
    cases.build("llama").save_pretrained(inside)
    cases.tokenizer().save_pretrained(inside)
    (inside / "1_Pooling").mkdir()
    (inside / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    (inside / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (snapshot / "LICENSE").write_text("of the dense model")
    (snapshot / "README.md").write_text("---\nlicense: mit\n---\n")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("another")
    (repository / "refs" / "v1").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = {"cache_dir": str(tmp_path), "revision": "v1", **({"subfolder": subfolder} if subfolder else {})}
    assert pooling_of(load("user/model", **source).model) == "cls"
    prune("user/model", output_dir=tmp_path / "out", **source)
    assert (tmp_path / "out" / "LICENSE").read_text() == "of the dense model"
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
    card = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (card.license, card.base_model) == ("mit", "user/model")


def test_a_token_is_handed_on_and_in_no_file_of_the_model(source, monkeypatch):
    asked = []
    model = load(str(source), token="hf_secret").model

    def cached(name, file, **options):
        asked.append(options["token"])

    monkeypatch.setattr(stored_files, "cached_file", cached)
    stored_files.stored_file(model, "modules.json")
    assert asked == ["hf_secret"]
    torch.save(model, pickled := io.BytesIO())
    assert b"hf_secret" not in pickled.getvalue()


def test_languages_that_yaml_takes_for_no_are_norwegian(tmp_path):
    for written, found in (("[en, no]", ["en", "no"]), ("no", "no"), ("en", "en")):
        (tmp_path / "README.md").write_text(f"---\nlanguage: {written}\n---\n")
        assert base_metadata(str(tmp_path), tmp_path / "README.md")["language"] == found


def test_the_subfolder_that_is_read_is_not_overwritten(tmp_path):
    cases.build("llama").save_pretrained(tmp_path / "root" / "sub")
    with pytest.raises(ValueError, match="is a model that is read"):
        prune_pretrained(
            str(tmp_path / "root"), QUICK, subfolder="sub", output_dir=tmp_path / "root" / "sub", overwrite=True
        )


def test_a_model_was_saved_before_it_is_checked(tmp_path):
    """`save_pretrained` leaves the dtype as a text in the configuration."""
    model = cases.build("llama")
    model.save_pretrained(tmp_path / "saved")
    assert next(skeleton(model.config).parameters()).dtype == model.dtype
    model.config.dtype = "float8_e4m3fn"
    with pytest.raises(ValueError, match="stored in float8_e4m3fn"):
        skeleton(model.config)


def test_a_folder_that_is_not_there_any_more_is_nobody_s_repository(tmp_path, monkeypatch):
    """Loaded by a relative path, and saved from another working directory."""
    cases.build("llama").save_pretrained(tmp_path / "runs" / "model")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("runs/model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    prune(model, QUICK).save_pretrained("out")
    card = ModelCard.load("out/README.md")
    assert "base_model" not in card.data.to_dict()
    assert "huggingface.co/runs" not in card.text
    model.config._commit_hash = "abc"
    prune(model, QUICK).save_pretrained("of the Hub")
    assert ModelCard.load("of the Hub/README.md").data.base_model == "runs/model"


def test_a_result_is_a_line_in_a_notebook(source):
    measured = {"evaluation": cases.batches("llama", seed=5)}
    result = prune_pretrained(str(source), QUICK, calibration=cases.batches("llama"), progress=False, **measured)
    assert re.fullmatch(r"PruneResult\(source: 50\.00% zeros, perplexity [\d,.]+ -> [\d,.]+\)", repr(result))
    smaller = prune(source, GradProbeConfig(structure={"ffn": 8}, importance="obs"))
    assert re.fullmatch(r"PruneResult\(source: [\d,]+ of [\d,]+ parameters\)", repr(smaller))


@pytest.mark.parametrize(
    ("written", "found"),
    [("me/dense", ["me/dense"]), ("[me/a, me/b]", ["me/a", "me/b"]), ("", []), ("123", []), ("[null]", []), ("[", [])],
)
def test_the_bases_that_a_card_names(written, found, tmp_path):
    (tmp_path / "README.md").write_text(f"---\nbase_model: {written}\n---\n")
    assert bases(tmp_path / "README.md") == found
    assert ("base_model" in base_metadata(str(tmp_path), tmp_path / "README.md")) == bool(found)
    assert bases(None) == []


def test_a_snapshot_in_the_cache_is_its_repository(source, tmp_path):
    """As `snapshot_download` returns it. It was called by its commit, and its base was what its card names."""
    commit = "0a1b" * 10
    folder = tmp_path / "models--me--name" / "snapshots" / commit
    shutil.copytree(source, folder)
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: other/before\n---\n")
    result = prune(str(folder))
    assert result.report.model["name"] == "me/name"
    assert result.report.model["commit"] == commit
    result.save_pretrained(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.license) == ("me/name", "mit")
    with pytest.raises(ValueError, match="push_to_hub='Me/name' is a model that is read"):
        check_not_read("Me/name", result.model)
    check_not_read("me/name-50", result.model)


def test_a_path_that_a_card_names_is_no_base(tmp_path):
    """Reports are published."""
    for named, found in (("/home/ann/llama", None), ("[/home/ann/llama, me/a]", ["me/a"])):
        (tmp_path / "README.md").write_text(f"---\nlicense: mit\nbase_model: {named}\n---\n")
        assert base_metadata(str(tmp_path), tmp_path / "README.md").get("base_model") == found


def test_a_name_as_long_as_a_disk_takes_is_no_hindrance(tmp_path):
    name = "模" * 80  # of 240 bytes
    with replacing(tmp_path / name) as scratch:
        (scratch / "file").write_text("new")
    with replacing(tmp_path / name) as scratch:
        (scratch / "file").write_text("newer")
    assert [(path.name, (path / "file").read_text()) for path in tmp_path.iterdir()] == [(name, "newer")]


def test_the_folder_that_one_is_in_has_a_name(source, tmp_path, monkeypatch):
    shutil.copytree(source, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert prune(".").report.model["name"] == "mine"


class Unsaved:
    """Somebody's own."""

    def __call__(self, *args, **kwargs):
        return cases.tokenizer()(*args, **kwargs)


def test_what_cannot_be_saved_is_told_before_the_work(source, tmp_path, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.pruning.decide_pruning", lambda *_: pytest.fail("it was probed"))
    given = {"processing_class": Unsaved(), "output_dir": tmp_path / "out"}
    with pytest.raises(ValueError, match=r"processing_class, a Unsaved, cannot be saved, .*AttributeError"):
        cases.prune(cases.build("llama"), cases.batches("llama"), **given)


def test_what_is_pushed_alone_wants_room_for_temporary_files(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.check_push", lambda *_: pytest.fail("it was created"))
    monkeypatch.setattr("gradprobe_hf.checkpoint.write.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="the checkpoint needs about"):
        cases.prune(cases.build("llama"), cases.batches("llama"), push_to_hub="me/model")


def test_a_report_is_that_of_the_folder_inside_that_is_read(tmp_path):
    for inside, sparsity in (("", 0.3), ("q60", 0.6)):
        cases.prune(
            cases.build("llama"), cases.batches("llama"), sparsity=sparsity, output_dir=tmp_path / "all" / inside
        )
    found = [stored_report(str(tmp_path / "all"), {"subfolder": inside}) for inside in ("", "q60", "q90")]
    assert [(round(report.sparsity, 1), config.sparsity) for report, config in found[:2]] == [(0.3, 0.3), (0.6, 0.6)]
    assert found[2] == (None, None)
    (tmp_path / "all" / "q60" / "gradprobe_config.json").unlink()  # as of what something else has pruned
    report, config = stored_report(str(tmp_path / "all"), {"subfolder": "q60"})
    assert (round(report.sparsity, 1), config) == (0.6, None)
