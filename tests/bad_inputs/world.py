"""The world that bad inputs are given in: files of every kind of damage, and models that must not change."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    BitsAndBytesConfig,
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import gradprobe_hf
from gradprobe_hf import GradProbeConfig, compare_pretrained, prune_pretrained, sweep_gradient_thresholds
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.training import (
    SelectiveUpdateCallback,
    SparsityCallback,
    SpikeAwareClip,
    StatePruningCallback,
    attached,
    keep_sparsity,
    masked_adapters,
    merge_with_masks,
)
from tests import cases

# What Python expressions may use of the package.
_PUBLIC: tuple[Any, ...] = (
    GradProbeConfig,
    SelectiveUpdateCallback,
    SparsityCallback,
    SpikeAwareClip,
    StatePruningCallback,
    compare_pretrained,
    keep_sparsity,
    masked_adapters,
    merge_with_masks,
    prune_pretrained,
    sweep_gradient_thresholds,
)
SMALL = {"num_samples": 4, "sequence_length": 16, "evaluation_samples": 4}


class World:
    """Files below `root`, with an empty working folder and a folder for temporary files of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.here, self.temporary = root, root / "here", root / "temporary"
        self.here.mkdir()
        self.temporary.mkdir()
        torch.manual_seed(0)
        self.models = {name: cases.build(name) for name in ("llama", "bert", "t5", "vit")}
        self.models |= {"whisper": _whisper().eval(), "clip": _clip().eval(), "unsaved": cases.build("llama")}
        self.models["unsaved"].generation_config.temperature = 0.5  # which transformers does not save without do_sample
        for name in ("llama", "t5", "vit"):
            self.models[name].save_pretrained(self.at(name))
            cases.tokenizer().save_pretrained(self.at(name))
        _damaged_checkpoints(self)
        _texts(self)
        _recipes(self)
        _states(self)
        self.names = _names(self)
        self._remember()

    def at(self, name: str) -> Path:
        return self.root / name

    def listing(self) -> dict[str, tuple[int, int]]:
        """Every file and folder, its size and when it was written."""
        found, folders = {}, [str(self.root)]
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    stat, is_folder = entry.stat(), entry.is_dir()
                    found[entry.path] = (0, 0) if is_folder else (stat.st_size, stat.st_mtime_ns)
                    folders += [entry.path] if is_folder else []
        return found

    def changed(self) -> list[str]:
        """The parameters and buffers that have other bits than at first, or a gradient."""
        return [
            name
            for name, (value, before, needs_gradient) in self._values.items()
            if not torch.equal(value, before) or value.requires_grad != needs_gradient or value.grad is not None
        ]

    def _remember(self) -> None:
        self._values = {
            f"{owner}.{name}": (value, value.detach().clone(), value.requires_grad)
            for owner, model in self.models.items()
            for name, value in (*model.named_parameters(), *model.named_buffers())
        }


def _names(world: World) -> dict[str, Any]:
    """What Python expressions may use."""
    llama = world.models["llama"]
    batches = cases.batches("llama")
    projection = "model.layers.0.self_attn.q_proj.weight"

    def prune(model: Any = llama, **options: Any) -> Any:
        return _called(prune_pretrained, model, options, calibration=batches, evaluation=False, apply=False)

    def compare(**options: Any) -> Any:
        return _called(compare_pretrained, llama, options, calibration=batches, evaluation=batches)

    def sweep(thresholds: Any = (0.1,), **options: Any) -> Any:
        return sweep_gradient_thresholds(
            llama, thresholds, **{"calibration": batches, "evaluation": batches, "progress": False, **options}
        )

    def train(callback: Any, make: Any = torch.optim.AdamW, model: Any = llama) -> None:
        optimizer = make(model.parameters()) if callable(make) else make
        with attached(callback, model, optimizer):
            pass

    images = torch.randn(2, 3, 8, 8)
    return {
        **world.models,
        **{one.__name__: one for one in _PUBLIC},
        "adam": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]),
        "at": world.at,
        "batches": batches,
        "compare": compare,
        "gradprobe_hf": gradprobe_hf,
        "BitsAndBytesConfig": BitsAndBytesConfig,
        "compiled_inside": _compiled_inside(),
        "eight_bit": _packed(torch.zeros(16, 16, dtype=torch.int8)),
        "four_bit": _packed(torch.zeros(128, 1, dtype=torch.uint8)),
        "ids": batches[0]["input_ids"],
        "mask": torch.zeros(16, 16).bool(),
        "Path": Path,
        "pixels": images,
        "prune": prune,
        "q": projection,
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "sweep": sweep,
        "text": world.at("plain.txt"),
        "texts": ["one text", "another"],
        "tokenizer": cases.tokenizer(),
        "torch": torch,
        "train": train,
    }


def _packed(weights: torch.Tensor) -> PreTrainedModel:
    """A model with weights of another type in place of a matrix, as bitsandbytes leaves them."""
    model = cases.build("llama")
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(weights, requires_grad=False)
    return model


def _compiled_inside() -> PreTrainedModel:
    model = cases.build("llama")
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


# What the short forms `prune(...)` and `compare(...)` give to the configuration.
_CONFIGURED = ("max_metric_drop", "include", "pattern", "update", "checkpointing", "score", "probes")


def _called(verb: Callable[..., Any], model: Any, options: dict[str, Any], **defaults: Any) -> Any:
    """The verb with a small configuration; what is in none of the two is for the verb to refuse."""
    of_config = {name: options.pop(name) for name in _CONFIGURED if name in options and verb is prune_pretrained}
    config = GradProbeConfig(**SMALL, **of_config)
    return verb(model, config, **{"progress": False, **defaults, **options})


def _whisper() -> PreTrainedModel:
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=cases.VOCABULARY,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=64,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            decoder_start_token_id=256,
            **cases.SPECIAL,
        )
    )


def _clip() -> PreTrainedModel:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": cases.VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 257}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config={**small, "image_size": 8, "patch_size": 4}, projection_dim=8)
    )


def _copy(world: World, name: str, **changes: Any) -> Path:
    """A copy of the good checkpoint; `changes` are made to its config.json."""
    path = Path(shutil.copytree(world.at("llama"), world.at(name)))
    if changes:
        _change(path / "config.json", **changes)
    return path


def _change(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text())
    values |= changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def _cut(file: Path, to: int | None = None) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 if to is None else to])


class _Code:
    """What a pickle of unknown origin may hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of the checkpoint was run",))


def _damaged_checkpoints(world: World) -> None:
    world.at("empty").mkdir()
    world.at("adapter").mkdir()
    (world.at("adapter") / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    (_copy(world, "config-missing") / "config.json").unlink()
    _cut(_copy(world, "config-cut") / "config.json")
    (_copy(world, "config-list") / "config.json").write_text("[1, 2]")
    (_copy(world, "config-blank") / "config.json").write_text("")
    (_copy(world, "config-binary") / "config.json").write_bytes(b"\xff\xfe\x00\x81")
    _copy(world, "hidden-size-text", hidden_size="sixteen")
    _copy(world, "heads-wrong", num_attention_heads=5)
    _copy(world, "layers-negative", num_hidden_layers=-1)
    _copy(world, "dtype-unknown", dtype="float99")
    _copy(world, "type-unknown", model_type="nonsense")
    _copy(world, "type-missing", model_type=...)
    _copy(world, "sizes-differ", hidden_size=32)
    (_copy(world, "weights-missing") / "model.safetensors").unlink()
    _cut(_copy(world, "weights-cut") / "model.safetensors")
    (_copy(world, "weights-blank") / "model.safetensors").write_bytes(b"")
    (_copy(world, "weights-text") / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    _sharded(world)
    for name, content in (("pickled", pickle.dumps(_Code())), ("pickle-cut", b"\x80\x04\x95")):
        path = _copy(world, name)
        (path / "model.safetensors").unlink()
        (path / "pytorch_model.bin").write_bytes(content)
    without = cases.build("llama")
    kept = {name: value for name, value in without.state_dict().items() if "layers.1.self_attn.q_proj" not in name}
    without.save_pretrained(_copy(world, "tensor-missing"), state_dict=kept)
    (_copy(world, "own-config-cut") / "gradprobe_config.json").write_text('{"sparsity": 0.')
    (_copy(world, "own-config-strange") / "gradprobe_config.json").write_text('{"sparsty": 0.5}')
    (_copy(world, "own-config-list") / "gradprobe_config.json").write_text("[]")
    _cut(_copy(world, "tokenizer-cut") / "tokenizer.json")
    for file in _copy(world, "tokenizer-missing").glob("tokenizer*"):
        file.unlink()
    large = cases.tokenizer()
    large.add_tokens([f"{word}" for word in ("sentence", "plain", "many")])
    large.save_pretrained(_copy(world, "tokenizer-large"))
    _quantized(world)
    _copy(world, "stored-4bit", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    for method in ("torchao", "bitnet"):
        _copy(world, f"stored-{method}", quantization_config={"quant_method": method})
    _copy(world, "stored-gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    (_copy(world, "with-words") / "merges.txt").write_text("a b\n" * 400)


def _sharded(world: World) -> None:
    index = "model.safetensors.index.json"
    for name in ("index-cut", "index-strange", "shard-missing", "shard-cut"):
        path = _copy(world, name)
        (path / "model.safetensors").unlink()
        world.models["llama"].save_pretrained(path, max_shard_size="20KB")
    _cut(world.at("index-cut") / index)
    (world.at("index-strange") / index).write_text('{"metadata": {}}')
    next(world.at("shard-missing").glob("model-00002-of-*")).unlink()
    _cut(next(world.at("shard-cut").glob("model-00002-of-*")))


def _quantized(world: World) -> None:
    """Weights in a type that is none to compute in, as a quantized checkpoint has them."""
    from safetensors.torch import load_file, save_file

    path = _copy(world, "quantized", dtype="float8_e4m3fn")
    weights = load_file(path / "model.safetensors")
    stored = {name: value.to(torch.float8_e4m3fn) if value.ndim == 2 else value for name, value in weights.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def _texts(world: World) -> None:
    plain = " ".join(f"Sentence {number} of many plain ones." for number in range(300))
    world.at("texts").mkdir()
    written = {
        "plain.txt": plain,
        "blank.txt": "",
        "short.txt": "Too short.",
        "broken.jsonl": '{"text": "one"}\n{"text": ',
        "no-text.jsonl": '{"a": "one", "b": "two"}\n',
        "null.jsonl": '{"text": null}\n{"text": null}\n',
        "lists.jsonl": '{"text": ["one", "two"]}\n' * 2,
        "mixed.jsonl": '{"text": "one"}\n{"text": ["two", 3]}\n',
        "spaces.txt": " \n" * 400,
        "texts/one.txt": plain,
    }
    for name, text in written.items():
        world.at(name).write_text(text)
    world.at("picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    world.at("broken.parquet").write_bytes(b"PAR1 and nothing more")
    world.at("binary.txt").write_bytes(bytes(range(128, 256)) * 40)
    for name in ("pictures", "test"):
        world.at(f"pictures-and-texts/{name}").mkdir(parents=True)
    world.at("pictures-and-texts/pictures/one.png").write_bytes(b"")
    world.at("pictures-and-texts/test/one.jsonl").write_text('{"text": "some words"}\n')


def _recipes(world: World) -> None:
    recipes = {
        "good": "num_samples: 4\nsequence_length: 16\nevaluation_samples: 4",
        "good-run": f"model: {world.at('llama')}\noutput: out",
        "broken": "sparsity: [0.5",
        "list": "- sparsity\n- 0.5",
        "text": "just text",
        "duplicate": "sparsity: 0.5\nseed: 1\nsparsity: 0.6",
        "sparsty": "sparsty: 0.5",
        "amount": "amount: 0.5",
        "dashes": "num-samples: 4",
        "number-key": "5: 6",
        "high": "sparsity: 1.5",
        "percent": "sparsity: 50%",
        "yes": "checkpointing: maybe",
        "effect": "damping: 0.1\nscore: wanda",
        "tag": "sparsity: !!python/object/apply:os.getcwd []",
        "anchor": "sparsity: *none",
        "null-seed": "seed: null",
        "other-seed": "seed: 9",
        "json-key": "json: true",
        "config-key": "config: other.yaml",
        "model-list": "model: [a, b]",
        "model-missing": "model: /no/such/model\noutput: out",
        "no-text": f"model: {world.at('llama')}\noutput: out\ncalibration: /no/text.txt",
        "whole-bad-dtype": f"model: {world.at('llama')}\noutput: out\ndtype: foo",
        "overwrite-text": f"model: {world.at('llama')}\noutput: out\noverwrite: sure",
    }
    for name, text in recipes.items():
        world.at(f"{name}.yaml").write_text(text + "\n")
    world.at("binary.yaml").write_bytes(b"\xff\xfe\x00sparsity\x81")


def _states(world: World) -> None:
    """Folders of a run that was killed after its first batch."""
    state = "process-0/probe-0-1/state.json"
    failing = patch("gradprobe_hf.probe.engine.summed_loss", _interrupted_in_its_third_call())
    with suppress(KeyboardInterrupt), failing:
        prune_pretrained(
            world.models["llama"],
            GradProbeConfig(**SMALL, save_every=1),
            calibration=cases.batches("llama"),
            evaluation=False,
            resume_dir=world.at("state-good"),
            progress=False,
        )
    names = ("cut", "blank", "missing", "strange", "other", "weights-cut", "text-cut")
    for name in map("state-{}".format, names):
        shutil.copytree(world.at("state-good"), world.at(name))
    _cut(world.at("state-cut") / state)
    (world.at("state-blank") / state).write_text("")
    (world.at("state-missing") / state).unlink()
    (world.at("state-strange") / state).write_text("[]")
    kept = json.loads((world.at("state-other") / state).read_text())
    kept["identity"]["model"] = "GPT2LMHeadModel"
    (world.at("state-other") / state).write_text(json.dumps(kept))
    (world.at("state-text-cut") / "process-0" / "own_text.safetensors").write_bytes(b"\x10\x00")
    for file in (world.at("state-weights-cut") / state).parent.glob("*.safetensors"):
        _cut(file)


def _interrupted_in_its_third_call() -> Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]:
    seen = []

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(seen) == 2:  # of the first batch twice: once to see what it reaches
            raise KeyboardInterrupt
        seen.append(batch)
        return summed_loss(model, batch)

    return loss
