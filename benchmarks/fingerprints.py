"""Record SHA-256 of the masks and the final weights of many small runs, and check later that the bits are the same.

A change that must not change what is computed is checked with it: record before, check after. Every run is seeded and
uses one thread; the same machine, torch and transformers give the same hashes. All of it is one file, because it also
runs on a checkout that has no such file.

usage: python benchmarks/fingerprints.py record FILE [--stories DIR --text FILE] [--only PATTERN]
       python benchmarks/fingerprints.py check FILE [--stories DIR --text FILE] [--only PATTERN]

PYTHONPATH says which checkout of gradprobe_hf runs. Without a small Llama (`--stories`, stories15M say) and a text for
it the runs that need them are left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import logging
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import peft
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

import gradprobe_hf
from gradprobe_hf import GradProbeConfig, compare_pretrained, prune_pretrained, sweep_gradient_thresholds
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

STORIES = "stories"
PROCESSES = 2
# Forked workers import nothing again; they are started before anything is computed.
START_METHOD = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
PATIENCE = timedelta(minutes=5)


class Fingerprint(NamedTuple):
    """SHA-256, in hex. Of a comparison or a sweep: `masks` of the numbers of zeros, `weights` of the losses."""

    masks: str
    weights: str


@dataclass(frozen=True)
class Place:
    """Where a run may write, and what it may read beside the tiny models."""

    folder: Path
    stories: Path | None = None
    text: Path | None = None


@dataclass(frozen=True)
class Run:
    """One run, as data.

    Attributes:
        how: what carries it out.
        model: a family of `FAMILIES`, or `STORIES`.
        options: of `GradProbeConfig`.
        call: what else `how` needs.
        processes: 1, or 2 over gloo.
    """

    how: Callable[[Run, Place], Fingerprint]
    model: str = "llama"
    options: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1


def stated(options: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of when the runs were written: two probes, windows without a BOS, `obs` half of the way."""
    named = {"preset", "pattern", "score", "probes", "rule", "update"} & set(options)
    of_text = {"add_special_tokens": False} if "sequence_length" in options else {}
    of_obs = {"dense_target": 0.5} if options.get("update") == "obs" else {}
    return {**({} if named else {"probes": 2}), **of_text, **of_obs, **options}


def configured(options: Mapping[str, Any]) -> GradProbeConfig:
    return GradProbeConfig(**stated(options))


def prune(run: Run, **arguments: Any) -> Any:
    """`prune_pretrained` with the options of a run."""
    return prune_pretrained(config=configured(run.options), progress=False, **arguments)


# Tiny models.

CAUSAL = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
LLAMA = {**CAUSAL, **SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 64}
# Family -> the names of its configuration and its model, and what the configuration is given.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_hidden_layers": 3, "tie_word_embeddings": False}),
    "tied": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**CAUSAL, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**LLAMA, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {**SHAPE, "vocab_size": 260, "num_hidden_layers": 2, "max_position_embeddings": 64},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 260, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 258, "pad_token_id": 258, "eos_token_id": 257},
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {**SHAPE, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with weights so large that gradients differ from matrix to matrix."""
    config, model_class, options = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model.to(dtype).eval()


def batches(family: str, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Three batches of two random rows."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        pixels = torch.randn(6, 3, 8, 8, generator=generator).to(dtype)
        rows = {"pixel_values": pixels, "labels": torch.randint(3, (6,), generator=generator)}
    else:
        rows = {"input_ids": torch.randint(256, (6, 12), generator=generator)}
    if family in ("bert", "t5"):
        rows["labels"] = torch.randint(256, (6, 9 if family == "t5" else 12), generator=generator)
    return [{name: values[first : first + 2] for name, values in rows.items()} for first in (0, 2, 4)]


def inputs(run: Run, place: Place) -> dict[str, Any]:
    """The model and the texts of a run, as arguments of `prune_pretrained`; `run.call` may replace each of them."""
    given = dict(run.call)
    dtype = given.pop("dtype", torch.float32)
    if run.model == STORIES:
        found = {"model_or_id": place.stories, "calibration": place.text, "evaluation": place.text, "dtype": dtype}
        return found | given
    found = {"calibration": batches(run.model, dtype=dtype), "evaluation": batches(run.model, seed=7, dtype=dtype)}
    return {"model_or_id": build(run.model, dtype)} | found | given


# How runs are carried out.


def sha256(parts: Iterable[bytes | str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Names, types, shapes and bits of tensors, in the order of their names."""

    def parts() -> Iterable[bytes | str]:
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            yield f"{name} {tensor.dtype} {list(tensor.shape)}\n"
            yield tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    return sha256(parts())


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Every weight, whole."""
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def pruned(run: Run, place: Place) -> Fingerprint:
    result = prune(run, **inputs(run, place))
    return Fingerprint(tensors_hash(result.masks), tensors_hash(state_of(result.model)))


def saved(run: Run, place: Place) -> Fingerprint:
    """The weights are those of the checkpoint."""
    result = prune(run, **inputs(run, place), output_dir=place.folder / "out")
    return Fingerprint(tensors_hash(result.masks), checkpoint_hash(place.folder / "out"))


def saved_later(run: Run, place: Place) -> Fingerprint:
    """With `apply=False`; the model itself must stay as it is."""
    given = inputs(run, place)
    before = tensors_hash(state_of(given["model_or_id"]))
    result = prune(run, **given, apply=False)
    result.save_pretrained(place.folder / "out")
    if tensors_hash(state_of(result.model)) != before:
        raise AssertionError("apply=False has changed the model")
    return Fingerprint(tensors_hash(result.masks), checkpoint_hash(place.folder / "out"))


def checkpoint_hash(folder: Path) -> str:
    return tensors_hash(
        {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    )


def offloaded(run: Run, place: Place) -> Fingerprint:
    """All weights on disk; they are read when they are needed."""
    given = inputs(run, place) | {"device_map": "disk", "offload_folder": place.folder / "offload"}
    if run.model != STORIES:
        given["model_or_id"].save_pretrained(place.folder / "model")
        given["model_or_id"] = place.folder / "model"
    result = prune(run, **given, output_dir=place.folder / "out")
    return Fingerprint(tensors_hash(result.masks), checkpoint_hash(place.folder / "out"))


def in_shards(run: Run, place: Place) -> Fingerprint:
    """FSDP2: the masks are those of this process's rows."""
    given = inputs(run, place)
    given["model_or_id"] = sharded(given["model_or_id"])
    result = prune(run, **given)
    return Fingerprint(tensors_hash(result.masks), tensors_hash(state_of(result.model)))


def sharded(model: PreTrainedModel) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass
class SummedLoss:
    """A `loss_fn` for causal models, that kills its process when it is called for the `killed_at`-th time."""

    killed_at: int | None = None
    calls: int = 0

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")


def resumed(run: Run, place: Place) -> Fingerprint:
    """Killed in another process at each of some moments, and finished in this one."""
    for moment in run.call["killed_at"]:
        child = multiprocessing.Process(target=_until, args=(run, place, moment))
        child.start()
        child.join()
        left = [path for path in (place.folder / "state").rglob("*") if path.is_file()]
        if child.exitcode != -signal.SIGKILL or not left:
            raise AssertionError(f"at loss {moment}: exit code {child.exitcode}, and {len(left)} files of a state")
    result = _until(run, place, None)
    return Fingerprint(tensors_hash(result.masks), tensors_hash(state_of(result.model)))


def _until(run: Run, place: Place, moment: int | None) -> Any:
    _settle()
    given = inputs(run, place)
    del given["killed_at"]
    return prune(run, **given, loss_fn=SummedLoss(moment), resume_dir=place.folder / "state")


def compared(run: Run, place: Place) -> Fingerprint:
    """The rows of `compare_pretrained`; its own baselines, or `run.call["configs"]`."""
    given = inputs(run, place)
    configs = given.pop("configs", None)
    if configs is not None:
        given["configs"] = {name: configured({**run.options, **options}) for name, options in configs.items()}
    if given.pop("on_disk", False):
        given["model_or_id"].save_pretrained(place.folder / "model")
        given["model_or_id"] = place.folder / "model"
        given |= {"device_map": "disk", "offload_folder": place.folder / "offload"}
    found = compare_pretrained(config=configured(run.options), progress=False, **given)
    return rows_hash(found.rows, found.dense.loss)


def swept(run: Run, place: Place) -> Fingerprint:
    given = inputs(run, place)
    sweep = partial(sweep_gradient_thresholds, config=configured(run.options), progress=False)
    found = sweep(given.pop("model_or_id"), given.pop("thresholds"), **given)
    return rows_hash(found.rows, found.dense.loss)


def rows_hash(rows: Sequence[Any], dense: float) -> Fingerprint:
    losses = [float(dense).hex(), *(float(row.loss).hex() for row in rows)]
    return Fingerprint(sha256(f"{row.zeros}\n" for row in rows), sha256(f"{loss}\n" for loss in losses))


# Training.


def half_pruned(run: Run) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model, half of each row of whose matrices is zero, and the masks."""
    model = build(run.model, run.call.get("dtype", torch.float32))
    config = configured({"score": "magnitude", "scope": "row"})
    return model, dict(prune_pretrained(model, config, evaluation=False, progress=False).masks)


def trained(run: Run, _place: Place) -> Fingerprint:
    """Six steps of AdamW with a callback."""
    model, masks = half_pruned(run)
    if run.call.get("shards"):
        model = sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with run.call["callback"](masks, model, optimizer):
        steps(model, optimizer, run.model)
    return trained_fingerprint(model)


def callback(made: Callable[[dict[str, Tensor]], Any]) -> Callable[..., Any]:
    """The context in which a callback, made from the masks, runs on a model and its optimizer."""
    return lambda masks, model, optimizer: attached(made(masks), model, optimizer)


def steps(model: Any, optimizer: torch.optim.Optimizer, family: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = batches(family, seed=3 + rank)
    model.train()
    for step in range(6):
        batch = rows[step % len(rows)]
        model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_fingerprint(model: nn.Module) -> Fingerprint:
    state = state_of(model)
    return Fingerprint(tensors_hash({name: value == 0 for name, value in state.items()}), tensors_hash(state))


def trained_by_trainer(run: Run, place: Place) -> Fingerprint:
    model, masks = half_pruned(run)
    arguments = TrainingArguments(
        output_dir=str(place.folder / "trainer"),
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    ids = [row for batch in batches(run.model, seed=3) for row in batch["input_ids"]]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[run.call["callback"](masks)])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trained_fingerprint(model)


def merged(run: Run, _place: Place) -> Fingerprint:
    """LoRA on a pruned model, trained and merged; `run.call["masked"]`: trained with the masked product."""
    half, masks = half_pruned(run)
    modules = ["c_attn", "c_proj"] if run.model == "gpt2" else ["q_proj", "down_proj"]
    lora = peft.LoraConfig(
        r=4, target_modules=modules, fan_in_fan_out=run.model == "gpt2", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    torch.manual_seed(5)
    model = peft.get_peft_model(half, lora)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    if not run.call.get("masked"):
        steps(model, optimizer, run.model)
        return trained_fingerprint(merge_with_masks(model, masks)[0])
    with masked_adapters(model, masks):
        steps(model, optimizer, run.model)
        return trained_fingerprint(merge_with_masks(model, masks)[0])


# The runs.


def tiny(model: str = "llama", how: Callable[[Run, Place], Fingerprint] = pruned, **options: Any) -> Run:
    return Run(how, model, options)


def pair(model: str = "llama", how: Callable[[Run, Place], Fingerprint] = pruned, **options: Any) -> Run:
    return Run(how, model, options, processes=PROCESSES)


def shards(model: str = "llama", **options: Any) -> Run:
    return Run(in_shards, model, options, {"dtype": torch.float64}, PROCESSES)


def killed(*moments: int, **options: Any) -> Run:
    return Run(resumed, "llama", {"save_every": 1, **options}, {"killed_at": moments, "evaluation": False})


def stories(how: Callable[[Run, Place], Fingerprint] = pruned, **options: Any) -> Run:
    calibrated = {} if options.get("score") == "magnitude" else {"num_samples": 4, "batch_size": 2}
    return Run(how, STORIES, {"sequence_length": 64, "evaluation_samples": 2, **calibrated, **options})


def training(made: Callable[[dict[str, Tensor]], Any], how: Any = trained, **call: Any) -> Run:
    return Run(how, "llama", {}, {"callback": callback(made) if how is trained else made, **call})


def called(run: Run, **call: Any) -> Run:
    return Run(run.how, run.model, run.options, {**run.call, **call}, run.processes)


def minus_loss(model: Any) -> float:
    """A metric of which more is better."""
    with torch.no_grad():
        return -sum(float(SummedLoss()(model, batch)) for batch in batches("llama", seed=7))


def state_pruning(saliency: str, **options: Any) -> Run:
    given = {"begin_step": 2, "end_step": 5, "every": 1, **options}
    return training(lambda _: StatePruningCallback(0.6, saliency, **given))  # type: ignore[arg-type]


SCORES = {
    "two probes": tiny(),
    "one probe": tiny(probes=1),
    "one probe, sequence": tiny(probes=1, fisher="sequence"),
    "one probe, token": tiny(probes=1, fisher="token"),
    "one probe, factored": tiny(probes=1, fisher="factored"),
    "two probes, sequence": tiny("gpt2", fisher="sequence", sparsity=0.37),
    "two probes, token": tiny("bert", fisher="token"),
    "two probes, factored": tiny("t5", fisher="factored"),
    "wanda": tiny(score="wanda", sparsity=0.45),
    "wanda, two probes": tiny(score="wanda", probes=2),
    "wanda, threshold": tiny(score="wanda", probes=2, rule="threshold", gradient_threshold=0.2),
    "magnitude": tiny(score="magnitude", sparsity=0.4),
    "magnitude, two probes": tiny(score="magnitude", probes=2),
    "random": tiny("gpt2", score="random", seed=3),
    "random, two probes": tiny(score="random", probes=2),
    "threshold": tiny(probes=2, rule="threshold", sparsity=0.6, gradient_threshold=0.3),
    "threshold by pattern": tiny(probes=2, rule="threshold", gradient_threshold={"*.mlp.*": 0.5, "*": 0.1}),
    "threshold adaptive": tiny("mixtral", probes=2, rule="threshold", gradient_threshold="adaptive"),
    "spike limit 0": tiny(spike_limit=0.0),
    "spike limit 1": tiny(spike_limit=1.0, reduction_factor=0.0),
}
SCOPES = {
    "one probe by block": tiny(probes=1, scope="block"),
    "one probe by tensor": tiny(probes=1, scope="tensor"),
    "one probe by row": tiny(probes=1, scope="row"),
    "two probes by block": tiny("t5", scope="block"),
    "two probes by tensor": tiny("vit", scope="tensor"),
    "two probes by row": tiny("gpt2", scope="row"),
    "two probes, global": tiny("mixtral", scope="global"),
    "threshold by row": tiny(probes=2, rule="threshold", scope="row"),
    "magnitude, global": tiny(score="magnitude", scope="global"),
    "magnitude by block": tiny("bert", score="magnitude", scope="block"),
    "wanda, global": tiny(score="wanda", scope="global"),
    "wanda by tensor": tiny("mixtral", score="wanda", scope="tensor"),
    "bounds": tiny(min_matrix_sparsity=0.4, max_matrix_sparsity=0.55),
    "bounds by block": tiny(probes=1, scope="block", max_matrix_sparsity=0.6),
}
MODELS = {
    "tied, embeddings": tiny("tied", include=["embed_tokens", "*_proj"]),
    "tied": tiny("tied", probes=1),
    "gpt2": tiny("gpt2"),
    "mixtral": tiny("mixtral", probes=1),
    "bert": tiny("bert"),
    "t5": tiny("t5", probes=1),
    "vit": tiny("vit", sparsity=0.6),
    "bfloat16": called(tiny(), dtype=torch.bfloat16),
    "float64": called(tiny(probes=1), dtype=torch.float64),
    "include": tiny(include=["q_proj", "re:.*mlp.*"], sparsity=0.7),
    "exclude": tiny(exclude=["down_proj", "model.layers.0.*"]),
}
UPDATES = {
    "obs": tiny(update="obs"),
    "least squares": tiny(update="least_squares"),
    "admm": tiny(update="admm"),
    "one probe, obs": tiny("gpt2", probes=1, update="obs", dense_target=1.0),
    "one probe, admm": tiny("mixtral", probes=1, update="admm"),
    "wanda, least squares": tiny("t5", score="wanda", update="least_squares", damping=0.1),
    "wanda, admm": tiny("bert", score="wanda", update="admm"),
    "magnitude, obs": tiny("vit", score="magnitude", update="obs"),
    "random, admm": tiny(score="random", update="admm", dense_target=0.0),
    "threshold, admm": tiny(probes=2, rule="threshold", gradient_threshold=0.3, update="admm"),
    "sparsegpt": tiny(update="sparsegpt"),
    "sparsegpt, dense target": tiny("mixtral", update="sparsegpt", dense_target=0.5, damping=0.05),
    "sparsegpt, least squares": tiny("gpt2", update="sparsegpt+least_squares"),
    "sparsegpt, admm": tiny(update="sparsegpt+admm"),
    "admm, bfloat16": called(tiny(update="admm"), dtype=torch.bfloat16),
}
PATTERNS = {
    "2:4": tiny(pattern="2:4"),
    "4:8": tiny("mixtral", pattern="4:8"),
    "2:4, fast": tiny(pattern="2:4", preset="fast"),
    "2:4, balanced": tiny(pattern="2:4", preset="balanced"),
    "2:4, best": tiny("bert", pattern="2:4", preset="best"),
    "4:8, fast": tiny("gpt2", pattern="4:8", preset="fast"),
    "2:4, one probe": tiny(pattern="2:4", probes=1, update="none"),
    "2:4, two probes": tiny(pattern="2:4", probes=2, update="none"),
    "4:8, two probes, obs": tiny("t5", pattern="4:8", probes=2, update="obs"),
    "2:4, two probes, least squares": tiny("gpt2", pattern="2:4", probes=2, update="least_squares"),
    "4:8, wanda": tiny(pattern="4:8", score="wanda", probes=0, update="none"),
    "2:4, magnitude": tiny("vit", pattern="2:4", score="magnitude", probes=0, update="none"),
    "1:4, one probe": tiny(pattern="1:4", probes=1, update="none"),
    "fast": tiny(preset="fast"),
    "balanced": tiny(preset="balanced"),
    "best": tiny(preset="best"),
}
SCHEDULES = {
    "sequential": tiny(order="sequential"),
    "sequential, reverse": tiny(order="sequential", block_order="reverse"),
    "sequential, size": tiny("t5", order="sequential", block_order="size"),
    "sequential, two blocks": tiny(order="sequential", block_order="forward", blocks_per_step=2),
    "sequential, mixtral": tiny("mixtral", order="sequential", block_order="reverse"),
    "sequential, admm": tiny(order="sequential", update="admm"),
    "sequential, obs, reverse": tiny("gpt2", order="sequential", update="obs", block_order="reverse"),
    "sequential, 2:4": tiny(order="sequential", pattern="2:4", probes=2, update="none"),
    "sequential, threshold": tiny(order="sequential", probes=2, rule="threshold", gradient_threshold=0.2),
    "rounds": tiny(rounds=(0.2, 0.35, 0.5)),
    "rounds, one probe": tiny(rounds=(0.3, 0.6), probes=1),
    "rounds, admm": tiny("gpt2", rounds=(0.3, 0.5), update="admm"),
    "search by perplexity": tiny(max_metric_drop="2%", sparsity=0.8, sparsity_step=0.2),
    "search by a metric": called(
        tiny(max_metric_drop=3.0, sparsity=0.8, initial_sparsity=0.1), metric_fn=minus_loss, evaluation=False
    ),
    "search, admm": tiny(max_metric_drop="0.5%", sparsity=0.9, sparsity_step=0.3, update="admm"),
}
EXECUTION = {
    "batch size auto": tiny(batch_size="auto"),
    "checkpointing": tiny(checkpointing=True),
    "checkpointing, mixtral": tiny("mixtral", checkpointing=True, fisher="token"),
    "bfloat16 accumulators": tiny(accumulator_dtype="bfloat16", fisher="token"),
    "int8 accumulators": tiny(accumulator_dtype="int8"),
    "accumulators on disk": tiny(accumulator_device="disk"),
    "int8 accumulators on disk": tiny("mixtral", accumulator_dtype="int8", accumulator_device="disk"),
    "accumulators on the host": tiny(accumulator_device="cpu", probes=1),
    "from disk": tiny(how=offloaded),
    "from disk, tied, obs": tiny("tied", offloaded, update="obs"),
    "from disk, mixtral, admm": tiny("mixtral", offloaded, probes=1, update="admm"),
    "from disk, sparsegpt": tiny("gpt2", offloaded, update="sparsegpt"),
    "from disk, sequential": tiny(how=offloaded, order="sequential", accumulator_device="disk"),
    "saved": tiny(how=saved),
    "saved, tied, best": tiny("tied", saved, preset="best"),
    "not applied, saved": tiny(how=saved_later, update="admm"),
    "killed in the first probe": killed(3, sparsity=0.4),
    "killed in the second probe": killed(5, accumulator_dtype="int8", accumulator_device="disk"),
    "killed twice, rounds": killed(5, 4, rounds=(0.2, 0.5)),
    "killed, sequential, admm": killed(8, order="sequential", update="admm"),
    "killed, threshold": killed(6, probes=2, rule="threshold", gradient_threshold=0.2),
}
DISTRIBUTED = {
    "two processes": pair(),
    "two processes, wanda": pair(score="wanda"),
    "two processes, admm": pair(update="admm"),
    "two processes, sparsegpt": pair(update="sparsegpt"),
    "two processes, int8, mixtral": pair("mixtral", accumulator_dtype="int8", fisher="sequence"),
    "two processes, sequential": pair(order="sequential"),
    "two processes, search": pair(max_metric_drop="2%", sparsity=0.8, sparsity_step=0.2),
    "fsdp2": shards(),
    "fsdp2, checkpointing": shards(checkpointing=True, fisher="token"),
    "fsdp2, gpt2": shards("gpt2", sparsity=0.37),
    "fsdp2, wanda": shards(score="wanda"),
    "fsdp2, threshold": shards(probes=2, rule="threshold", gradient_threshold=0.3, sparsity=0.6),
    "fsdp2, 2:4": shards(pattern="2:4", probes=2, update="none"),
    "fsdp2, tied, embeddings": shards("tied", include=["embed_tokens", "*_proj"]),
    "fsdp2, state pruning": Run(
        trained,
        call={
            "callback": callback(lambda _: StatePruningCallback(0.6, begin_step=2, end_step=4, every=1)),
            "shards": True,
        },
        processes=PROCESSES,
    ),
    "fsdp2, selective": Run(
        trained,
        call={"callback": callback(lambda _: SelectiveUpdateCallback(top_k=2)), "shards": True},
        processes=PROCESSES,
    ),
    "fsdp2, keep sparsity": Run(
        trained,
        call={"callback": callback(lambda _: SparsityCallback("from-zeros")), "shards": True},
        processes=PROCESSES,
    ),
}
TRAINING = {
    "sparsity callback": training(lambda masks: SparsityCallback(masks)),
    "sparsity callback from zeros": training(lambda _: SparsityCallback("from-zeros")),
    "keep sparsity": Run(
        trained, call={"callback": lambda masks, model, optimizer: keep_sparsity(model, optimizer, masks)}
    ),
    "state, magnitude": state_pruning("magnitude"),
    "state, fourth root": state_pruning("fourth-root", schedule="linear"),
    "state, momentum": state_pruning("momentum", schedule="late-cubic"),
    "state, gradient product": state_pruning("gradient-product", scope="tensor"),
    "state, signal to noise": state_pruning("signal-to-noise", every=2, initial_sparsity=0.2),
    "state, movement": state_pruning("movement"),
    "state, fisher": state_pruning("state-fisher", exclude=["down_proj"]),
    "selective by block": training(lambda _: SelectiveUpdateCallback(top_k=2, every=2)),
    "selective by matrix": training(lambda _: SelectiveUpdateCallback(fraction=0.3, groups="matrix")),
    "selective by pattern": training(lambda _: SelectiveUpdateCallback(top_k=1, groups=["*mlp*", "*attn*"])),
    "spike aware clip": training(lambda _: SpikeAwareClip(threshold=1.1, warmup=1, reset_every=4)),
    "trainer, sparsity callback": training(SparsityCallback, trained_by_trainer),
    "trainer, state pruning": training(
        lambda _: StatePruningCallback(0.6, begin_step=2, end_step=4, every=1), trained_by_trainer
    ),
    "lora merged": Run(merged),
    "lora merged, gpt2": Run(merged, "gpt2"),
    "lora masked": Run(merged, call={"masked": True}),
}
BESIDE_IT: dict[str, dict[str, Any]] = {
    "magnitude": {"score": "magnitude"},
    "wanda": {"score": "wanda"},
    "sparsegpt": {"update": "sparsegpt"},
    "one probe": {"probes": 1},
    "two probes": {"probes": 2},
    "one probe, admm": {"probes": 1, "update": "admm"},
    "one probe, obs": {"probes": 1, "update": "obs"},
}
COMPARISONS = {
    "compared": called(tiny(how=compared, sparsity=0.6), configs=BESIDE_IT),
    "compared, the baselines": tiny("mixtral", compared),
    "compared, from disk": called(tiny("tied", compared), on_disk=True, configs=BESIDE_IT),
    "swept": called(tiny(how=swept, sparsity=0.6), thresholds=[0.0, 0.2, 1.0, {"*.mlp.*": 0.5, "*": 0.1}, "adaptive"]),
    "swept, tuned": called(tiny(how=swept, sparsity=0.6), thresholds=[0.0, 5.0], max_metric_drop="1%"),
}
SMALL = {
    "stories, two probes": stories(),
    "stories, one probe": stories(probes=1, fisher="token"),
    "stories, best": stories(preset="best"),
    "stories, 2:4": stories(pattern="2:4"),
    "stories, wanda": stories(score="wanda"),
    "stories, magnitude": stories(score="magnitude"),
    "stories, sparsegpt": stories(update="sparsegpt", sparsity=0.6),
    "stories, threshold": stories(probes=2, rule="threshold", gradient_threshold="adaptive"),
    "stories, sequential": stories(order="sequential", blocks_per_step=3),
    "stories, from disk, int8": stories(offloaded, accumulator_dtype="int8", accumulator_device="disk"),
    "stories, blocks": stories(preset="best", refinement="blocks", num_samples=32),
    "stories, recovery": stories(preset="best", recovery_steps=6),
    "stories, bfloat16, best": called(stories(preset="best"), dtype=torch.bfloat16),
    "stories, bfloat16, blocks": called(
        stories(preset="best", refinement="blocks", num_samples=32), dtype=torch.bfloat16
    ),
    "stories, bfloat16, recovery": called(stories(update="sparsegpt+admm", recovery_steps=6), dtype=torch.bfloat16),
    "stories, bfloat16, obs": called(stories(update="obs"), dtype=torch.bfloat16),
    "stories, search": stories(max_metric_drop="10%", sparsity=0.6, sparsity_step=0.3, probes=1),
    "stories, own text": called(stories(probes=1, seed=2), calibration="self"),
    "stories, manual": called(stories(probes=1), calibration="pydoc", evaluation=None),
}
RUNS: dict[str, Run] = (
    SCORES | SCOPES | MODELS | UPDATES | PATTERNS | SCHEDULES | EXECUTION | DISTRIBUTED | TRAINING | COMPARISONS | SMALL
)


# The command.


def _settle() -> None:
    """One thread, the same random numbers whatever ran before, and no word of the libraries between the hashes."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    transformers.set_seed(0)


def carry_out(name: str, place: Place) -> Fingerprint | str:
    """The fingerprint of a run, or the error that it ended with."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = place.folder / f"{list(RUNS).index(name)}-{rank}"
    folder.mkdir()
    _settle()
    try:
        return RUNS[name].how(RUNS[name], Place(folder, place.stories, place.text))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _work(rank: int, names: Sequence[str], place: Place) -> None:
    """One of the two processes: all of their runs, one after the other."""
    _settle()
    store = f"file://{place.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES, timeout=PATIENCE)
    found = {name: carry_out(name, place) for name in names}
    (place.folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def carried_out_together(names: Sequence[str], place: Place) -> dict[str, Fingerprint | str]:
    """The runs of two processes; a fingerprint is of what both of them have."""
    workers = [multiprocessing.Process(target=_work, args=(rank, names, place)) for rank in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise ChildProcessError(f"the two processes ended with {[worker.exitcode for worker in workers]}")
    both = [json.loads((place.folder / f"rank-{rank}.json").read_text()) for rank in range(PROCESSES)]
    found: dict[str, Fingerprint | str] = {}
    for name in names:
        of_ranks = [one[name] for one in both]
        failed = next((one for one in of_ranks if isinstance(one, str)), None)
        found[name] = failed or Fingerprint(*(sha256(hashes) for hashes in zip(*of_ranks, strict=True)))
    return found


def all_of(names: Sequence[str], place: Place, tell: Callable[[str, Fingerprint | str], None]) -> None:
    together = [name for name in names if RUNS[name].processes > 1]
    for name, found in carried_out_together(together, place).items() if together else ():
        tell(name, found)
    for name in names:
        if name not in together:
            tell(name, carry_out(name, place))


def environment() -> dict[str, str]:
    """What else decides the bits of a result."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def is_meant(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, f"*{pattern}*")


def chosen_runs(pattern: str, with_stories: bool) -> list[str]:
    names = [name for name in RUNS if is_meant(name, pattern)]
    left_out = [name for name in names if RUNS[name].model == STORIES and not with_stories]
    if left_out:
        print(f"left out, without --stories and --text: {len(left_out)} runs ({'; '.join(left_out)})")
    return [name for name in names if name not in left_out]


def verdict_of(found: Fingerprint | str, wanted: Sequence[str] | None) -> str:
    if isinstance(found, str):
        return f"FAILED {found}"
    if wanted is None:
        return "NOT RECORDED"
    return "same" if list(found) == list(wanted) else "DIFFERENT"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Record, or check, SHA-256 of the masks and weights of many runs.")
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path, help="the JSON file of the hashes")
    parser.add_argument("--only", default="", metavar="PATTERN", help="runs whose name has this; a glob")
    parser.add_argument("--stories", type=Path, metavar="DIR", help="a small Llama, with its tokenizer")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text for it")
    asked = parser.parse_args(argv)
    if (asked.stories is None) != (asked.text is None):
        parser.error("--stories and --text go together")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    asked, began = parsed(argv), time.perf_counter()
    multiprocessing.set_start_method(START_METHOD, force=True)
    _settle()
    print(f"gradprobe_hf of {Path(str(gradprobe_hf.__file__)).parent}")
    names = chosen_runs(asked.only, asked.stories is not None)
    recorded = json.loads(asked.file.read_text()) if asked.action == "check" else {"runs": {}}
    if asked.action == "check" and recorded["environment"] != environment():
        print(f"recorded with {recorded['environment']}, checked with {environment()}: the bits may differ for that")
    hashes: dict[str, Fingerprint] = {}
    bad: list[str] = []

    def tell(name: str, found: Fingerprint | str) -> None:
        said = verdict_of(found, recorded["runs"].get(name) if asked.action == "check" else tuple(found))
        if said != "same":
            bad.append(name)
        shown = ("-", "-") if isinstance(found, str) else found
        print(f"{name:32s} {shown[0][:12]:12s} {shown[1][:12]:12s} {said}", flush=True)
        if isinstance(found, Fingerprint):
            hashes[name] = found

    with tempfile.TemporaryDirectory() as scratch:
        all_of(names, Place(Path(scratch), asked.stories, asked.text), tell)
    unknown = [name for name in recorded["runs"] if name not in RUNS and is_meant(name, asked.only)]
    for name in unknown:
        print(f"{name:32s} {'-':12s} {'-':12s} MISSING: recorded, and no longer a run")
    if asked.action == "record":
        asked.file.write_text(json.dumps({"environment": environment(), "runs": hashes}, indent=2) + "\n")
    bad += unknown
    print(f"{len(names)} runs, {len(bad)} not as they should be, {time.perf_counter() - began:.0f} s")
    return bool(bad) or not names


if __name__ == "__main__":
    sys.exit(main())
