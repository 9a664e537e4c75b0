"""Checks of a recovery: what cannot work, said before anything is trained."""

from __future__ import annotations

import filecmp
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.checkpoint.saving import Savable
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.data.sources import is_path
from gradprobe_hf.model.families import is_causal, labels_whole_sequences
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loading.adapters import active_adapters, has_adapters, stored_adapter
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.targets import default_targets, every_matrix
from gradprobe_hf.run.apply import check_whole
from gradprobe_hf.run.request.checks import check_paths
from gradprobe_hf.runtime.row_chunks import CACHED_ELEMENTS, row_chunks
from gradprobe_hf.tasks.table import task_of_class

UNRELATED = 0.1  # cosine of embeddings: a pruning at random of 95% of them would leave 0.22

_NUMBERED = re.compile(r"(.*?)\.(\d+)\.(.*)")  # stack, number and name of a parameter of a block

# What `accelerate launch` tells a Trainer to do with the weights.
_LAUNCHED = {"ACCELERATE_USE_FSDP": "sharded by FSDP2", "ACCELERATE_USE_DEEPSPEED": "given to DeepSpeed"}


def check_models(pruned: Any, teacher: Any, from_pretrained_kwargs: Mapping[str, Any]) -> None:
    """Raise for arguments that cannot be models, paths that are not there, and what loads them in a way unlike ours.

    Raises:
        TypeError: no model and no name.
        FileNotFoundError: no such folder.
        ValueError: an argument for loading that has no effect, or cannot be used here.
    """
    for name, given in (("pruned", pruned), ("teacher", teacher)):
        if isinstance(given, Savable) and not isinstance(given, PruneResult):
            raise TypeError(
                f"{name} must be a model or its name, got {type(given).__name__}: pass its .model, or the folder that "
                "it was saved in."
            )
    if isinstance(teacher, PruneResult):
        raise TypeError("teacher must be the dense model, or its name, and this PruneResult is of the pruned one.")
    if isinstance(pruned, PruneResult) and pruned.removal is not None:
        raise ValueError(
            "pruned has lost whole structures, and is smaller once it is saved: save it (save_pretrained), and recover "
            "the checkpoint."
        )
    if (adapters := _adapters(pruned)) is not None:
        raise ValueError(
            f"pruned has adapters ({adapters}): folded in, they would fill its zeros. Recover the model without them, "
            "or with lora_r (--lora-r), which trains adapters inside the mask and folds them in."
        )
    if "merge_adapters" in from_pretrained_kwargs:
        raise ValueError(
            "merge_adapters has no part in a recovery: adapters of the teacher are folded in unasked. Leave it out."
        )
    if "device_map" in from_pretrained_kwargs:
        raise ValueError(
            f"device_map={from_pretrained_kwargs['device_map']!r} has no part in a recovery: all weights are trained, "
            "on the accelerator where there is one. Leave it out; `accelerate launch` takes several devices."
        )
    by_name = {"pruned": pruned, "teacher": teacher}
    if from_pretrained_kwargs and all(isinstance(model, (nn.Module, PruneResult)) for model in by_name.values()):
        raise ValueError(
            f"{', '.join(from_pretrained_kwargs)} only make sense when a model is loaded by name; both are loaded "
            "already."
        )
    check_paths(None, {}, **by_name)


def check_revisions(pruned: Any, teacher: Any, revision: str | None, teacher_revision: str | None) -> None:
    """Raise ValueError for a revision of a model that is loaded already."""
    for option, value, name, model in (
        ("revision", revision, "pruned", pruned),
        ("teacher_revision", teacher_revision, "teacher", teacher),
    ):
        if value is not None and isinstance(model, (nn.Module, PruneResult)):
            other = ", or give teacher_revision, which is the teacher's" if option == "revision" else ""
            raise ValueError(f"{option}={value!r} has no effect here: {name} is loaded already. Leave it out{other}.")


def _adapters(pruned: Any) -> str | None:
    """What adapts a model in memory, or the name of a folder that holds an adapter; None of others."""
    if isinstance(pruned, nn.Module):
        return active_adapters(pruned) if has_adapters(pruned) else None
    is_folder = isinstance(pruned, (str, os.PathLike)) and Path(pruned).is_dir()
    return str(pruned) if is_folder and stored_adapter(str(pruned), {}) is not None else None


def check_texts(text: Any, evaluation: Any) -> None:
    """Raise for texts that are not there, and where one text is trained on and measured on.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no text, or one text twice.
    """
    if isinstance(text, bool) or text is None or evaluation is True:
        argument, value = ("evaluation", evaluation) if evaluation is True else ("text", text)
        raise ValueError(f"{argument} must be text or batches, got {value!r}.")
    check_paths(None, {"text": text, "evaluation": evaluation})
    names = text if isinstance(text, Mapping) else [text] if isinstance(text, (str, os.PathLike)) else []
    for name in names:
        if is_path(str(name)) and (str(name) == str(evaluation) or _holds_the_same(name, evaluation)):
            raise ValueError(
                f"evaluation={str(evaluation)!r} is the text that is trained on, and would show what was learned by "
                "heart: evaluate on another text."
            )


def _holds_the_same(name: Any, other: Any) -> bool:
    """Whether two names are of files with the same bytes."""
    if not isinstance(other, (str, os.PathLike)):
        return False
    one, another = Path(name).expanduser(), Path(other).expanduser()
    return one.is_file() and another.is_file() and filecmp.cmp(one, another, shallow=False)


def check_dealt(config: RecoveryConfig, processes: int) -> None:
    """Raise ValueError where the windows of a step cannot be dealt to the processes in equal parts."""
    parts = processes * config.gradient_accumulation_steps
    if config.batch_size % parts:
        raise ValueError(
            f"batch_size={config.batch_size} windows cannot be dealt to {processes} processes in "
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} parts each: choose a multiple of "
            f"{parts} (--batch-size {config.batch_size + -config.batch_size % parts})."
        )


def check_trainable(model: PreTrainedModel, option: str) -> None:
    """Raise ValueError for a model whose weights cannot be trained towards another's predictions.

    Args:
        option: what asks for it.
    """
    check_whole(model)
    if not _predicts_classes(model):
        raise ValueError(
            f"{option} compares predictions of one token or class out of several, and a {type(model).__name__} makes "
            "others. Fine-tune it with gradprobe_hf.training.SparsityCallback, which keeps its zeros."
        )
    launched = next((how for name, how in _LAUNCHED.items() if os.environ.get(name) == "true"), "")
    if is_offloaded(model) or is_sharded(model) or launched:
        where = "offloaded" if is_offloaded(model) else launched or "sharded by FSDP2"
        how = (
            "by a configuration of Accelerate's that gives every process a whole model "
            "(examples/accelerate_processes.yaml)"
            if launched
            else "where a whole model fits on each device"
        )
        raise ValueError(
            f"{option} trains all weights, and those of this model are {where}. Prune it first, and train the "
            f"checkpoint {how}, where memory is short with adapters alone: `gradprobe recover --lora-r 16`."
        )
    reads_text = model.main_input_name == "input_ids"
    if reads_text and labels_whole_sequences(model) and model.config.get_text_config().pad_token_id is None:
        raise ValueError(
            f"{option} trains on several rows at once, and the configuration of this {type(model).__name__} has no "
            "pad_token_id, by which it would find the last token of each: set model.config.pad_token_id to the "
            "tokenizer's."
        )
    if not all(p.is_floating_point() for p in model.parameters()):
        raise ValueError(f"{option} trains weights, and those of this model are quantized: load it dequantised.")


def _predicts_classes(model: PreTrainedModel) -> bool:
    """Whether a model predicts a distribution of tokens, or of classes, where each label is."""
    if is_causal(model):
        return True
    task, config = task_of_class(type(model).__name__, model.config.is_encoder_decoder), model.config
    if task is None or not task.has_classes:
        return False
    kind = str(getattr(config, "problem_type", None))  # a measure, or classes that each are a row's own or not
    return not task.one_label or (config.num_labels > 1 and "multi" not in kind and kind != "regression")


def is_smaller(pruned: PreTrainedModel, dense: PreTrainedModel) -> bool:
    """Whether whole structures of the dense model are gone: blocks are fewer or smaller, and all else is the same."""
    mine, others = _Shapes.of(pruned), _Shapes.of(dense)
    # Embeddings, norms and heads have the width of the stream, which all structures leave.
    if mine == others or mine.outside != others.outside or mine.stacks.keys() != others.stacks.keys():
        return False
    return all(_are_left(mine.stacks[stack], others.stacks[stack]) for stack in mine.stacks)


@dataclass(frozen=True)
class _Shapes:
    """The shapes of a model's parameters by name: those outside of blocks, and of each stack those of every block."""

    outside: Mapping[str, torch.Size]
    stacks: Mapping[str, list[Mapping[str, torch.Size]]]

    @classmethod
    def of(cls, model: nn.Module) -> _Shapes:
        outside, stacks = {}, dict[str, dict[int, dict[str, torch.Size]]]()
        for name, parameter in model.named_parameters():
            if (found := _NUMBERED.match(name)) is None:
                outside[name] = parameter.shape
            else:
                stack, number, rest = found.groups()
                stacks.setdefault(stack, {}).setdefault(int(number), {})[rest] = parameter.shape
        return cls(outside, {stack: [blocks[number] for number in sorted(blocks)] for stack, blocks in stacks.items()})


def _are_left(blocks: Sequence[Mapping[str, torch.Size]], dense: Sequence[Mapping[str, torch.Size]]) -> bool:
    """Whether these may be what is left of the dense blocks, in their order."""
    following = iter(dense)
    return all(any(_is_left(block, other) for other in following) for block in blocks)


def _is_left(block: Mapping[str, torch.Size], dense: Mapping[str, torch.Size]) -> bool:
    return block.keys() <= dense.keys() and all(
        len(own) == len(dense[name]) and all(size <= there for size, there in zip(own, dense[name], strict=True))
        for name, own in block.items()
    )


def check_alike(pruned: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Raise ValueError unless both are of one architecture, with the same sizes, or the pruned one is smaller."""
    remedy = "Give the dense model that it was pruned from."
    if type(pruned).__name__ != type(dense).__name__:
        # A checkpoint of the bare model is pruned as what it is for, and says so itself from then on.
        raise ValueError(
            f"the pruned model is a {type(pruned).__name__} and the teacher a {type(dense).__name__}. {remedy} One "
            "whose checkpoint names another class is loaded for a task (task, --task)."
        )
    if is_smaller(pruned, dense):
        return
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} for model in (pruned, dense)
    ]
    for name in [*shapes[0], *shapes[1]]:
        mine, other = (found.get(name) for found in shapes)
        if mine != other:
            raise ValueError(f"{name} is {mine} in the pruned model and {other} in the teacher. {remedy}")


def check_pruned(pruned: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Raise ValueError unless a weight is zero that the dense model has, or whole structures are gone."""
    if is_smaller(pruned, dense):
        return
    for target in every_matrix(pruned):  # something else may have pruned convolutions
        dense_matrix = target.matrix(dense)
        if bool(((target.matrix(pruned) == 0) & (dense_matrix != 0).to(target.matrix(pruned).device)).any()):
            return
    raise ValueError(
        "no weight is zero in the pruned model that is not zero in the teacher too: prune it first (of apply=False, "
        "save the result and recover the checkpoint), and give the dense model that it was pruned from as the teacher "
        "(teacher, --teacher)."
    )


@torch.no_grad()
def check_related(pruned: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Raise ValueError where matrices outside of the blocks, embeddings above all, have nothing in common.

    A pruning leaves them alone, and a recovery or fine-tuning moves them a little. They are others in a model whose
    weights were never loaded, and in one of the same sizes that was trained from another beginning.
    """
    inside = {target.parameter for target in default_targets(pruned)}  # they are others where whole blocks are gone
    others = dict(dense.named_parameters())
    products = torch.zeros(3, dtype=torch.float64)  # of the two, and of each with itself
    for name, own in pruned.named_parameters():
        other = others.get(name)
        if own.ndim < 2 or name in inside or other is None or own.shape != other.shape:
            continue
        of_matrix = torch.zeros(3, device=own.device)  # one copy to the host for each matrix
        for rows in row_chunks((len(own), own[0].numel()), CACHED_ELEMENTS):
            a, b = own[rows].flatten().float(), other[rows].to(own.device).flatten().float()
            of_matrix += torch.stack([a @ b, a @ a, b @ b])
        products += of_matrix.cpu()
    between, *squares = products.tolist()
    if not all(squares):  # there are none, or they have yet to learn
        return
    cosine = between / math.sqrt(math.prod(squares))
    if cosine < UNRELATED:
        raise ValueError(
            f"the teacher has other embeddings than the pruned model: their cosine is {cosine:.2f}, as of weights that "
            "were never loaded, or of another training. Give the dense model that it was pruned from (teacher, "
            "--teacher)."
        )
