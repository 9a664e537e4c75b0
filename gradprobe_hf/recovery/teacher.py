"""The teacher: where the dense model's predictions come from, the model itself or what it has written to disk.

On disk are the k most likely tokens of each position (`TopPredictions`), 2 + 4 bytes each: with k = 512
about 3 GB for a million tokens. The dense model reads the text once, before training, whatever the number of epochs.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.evaluation.divergence_loss import Predictions, TopPredictions, WholePredictions
from gradprobe_hf.model.fingerprint import model_fingerprint
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.loss import next_token_logits
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.recovery.text import COUNTED, NEXT_TOKENS, WINDOW, Layout, RecoveryText, collated
from gradprobe_hf.runtime.processes import Processes

logger = logging.getLogger(__name__)

_DONE = "predictions.json"
_FILES = {"log_p": np.float16, "ids": np.int32, "log_rest": np.float32}


class Teacher(Protocol):
    @property
    def identity(self) -> str:
        """What tells it from others."""

    def predictions(self, batch: Mapping[str, Tensor]) -> Predictions:
        """Those for every token of a batch that `text.collated` made."""


@dataclass(frozen=True)
class LiveTeacher:
    """The dense model, run on each batch. Attributes: `layout` of the batches."""

    model: PreTrainedModel
    layout: Layout = NEXT_TOKENS

    @property
    def identity(self) -> str:
        return model_fingerprint(self.model)

    @torch.no_grad()
    def predictions(self, batch: Mapping[str, Tensor]) -> Predictions:
        return WholePredictions(self.logits(batch))

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """`[sequences * tokens, vocabulary]`, or `[predictions, classes]`."""
        inputs = send_to_device(self.layout.inputs(batch), input_device(self.model))
        with eval_mode(self.model):
            if self.layout.is_causal:
                return next_token_logits(self.model, inputs)[0]
            return self.layout.flat(self.model(**inputs, **self.layout.call).logits, batch[COUNTED])


@dataclass(frozen=True)
class WrittenTeacher:
    """What the dense model has written to disk.

    Attributes:
        arrays: mapped files: `log_p` and `ids` `[rows, tokens, k]`, `log_rest` `[rows, tokens]`.
        identity: of the model that wrote it.
    """

    arrays: Mapping[str, np.memmap[Any, Any]]
    identity: str

    def predictions(self, batch: Mapping[str, Tensor]) -> Predictions:
        ids = batch["input_ids"]
        rows, length = batch[WINDOW].tolist(), ids.shape[1]
        read = {
            name: torch.from_numpy(np.stack([array[row, :length] for row in rows])).to(ids.device).flatten(0, 1)
            for name, array in self.arrays.items()
        }
        log_p, log_rest = read["log_p"].float(), read["log_rest"]
        # The probabilities were rounded: put in proportion, they and the rest come to 1 again.
        whole = torch.log1p(-log_rest.exp())
        return TopPredictions(log_p + (whole - log_p.logsumexp(-1))[:, None], read["ids"], log_rest)


@dataclass(frozen=True)
class Writing:
    """How predictions are written to disk.

    Attributes:
        folder: that all processes see.
        k: tokens of each position.
        batch_size: rows in one pass.
    """

    folder: Path
    k: int
    batch_size: int
    processes: Processes
    progress: bool


@torch.no_grad()
def written(model: PreTrainedModel, text: RecoveryText, how: Writing) -> WrittenTeacher:
    """The dense model's k most likely tokens, for all rows; read again if they are there, of this model and text.

    Raises:
        OSError: they do not fit on the disk.
    """
    shape = (len(text.rows), text.longest, how.k)
    live = LiveTeacher(model)
    done = {"shape": list(shape), "identity": f"{live.identity} {text.described['fingerprint']}"}
    if _read(how.folder / _DONE) != done:
        how.processes.on_main(lambda: _allocate(how.folder, shape))
        arrays = _mapped(how.folder, shape, "r+")
        numbered = [{**row, WINDOW: number} for number, row in enumerate(text.rows)]
        parts = [numbered[first : first + how.batch_size] for first in range(0, len(numbered), how.batch_size)]
        mine = how.processes.mine(parts)

        def write() -> None:
            bar = tqdm(mine, desc="dense model's predictions", unit="batch", disable=not how.progress, leave=False)
            for part in bar:
                _write(arrays, part, live, how.k)
            for array in arrays.values():
                array.flush()

        # Said only once all have written theirs: a run that ends before makes everything anew, and reads no zeros.
        how.processes.in_all(write)
        if how.processes.is_main:
            (how.folder / _DONE).write_text(json.dumps(done), encoding="utf-8")
        how.processes.barrier()
    return WrittenTeacher(_mapped(how.folder, shape, "r"), live.identity)


def _write(arrays: Mapping[str, Any], part: list[dict[str, Any]], live: LiveTeacher, k: int) -> None:
    batch = collated(part)
    top = TopPredictions.of(live.logits(batch), k)
    rows, length = batch["input_ids"].shape
    for name, array in arrays.items():
        values = getattr(top, name).unflatten(0, (rows, length)).cpu().numpy()
        for row, number in enumerate(batch[WINDOW].tolist()):
            array[number, :length] = values[row].astype(array.dtype)


def _allocate(folder: Path, shape: tuple[int, int, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _DONE).unlink(missing_ok=True)
    sizes = {name: int(np.prod(_shape(name, shape))) * np.dtype(kind).itemsize for name, kind in _FILES.items()}
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    logger.info("the dense model's predictions take %.2f GB in %s", needed / 1e9, folder)
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the dense model's predictions need {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: leave "
            "teacher_top_k unset, or ask for fewer tokens or windows (num_samples)",
            str(folder),
        )
    for name, size in sizes.items():
        with open(folder / name, "wb") as file:
            # Truly allocated, where that can be asked for: writing to a mapped hole on a full disk ends the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)


def _mapped(folder: Path, shape: tuple[int, int, int], mode: Any) -> dict[str, Any]:
    return {
        name: np.memmap(folder / name, dtype=kind, mode=mode, shape=_shape(name, shape))
        for name, kind in _FILES.items()
    }


def _shape(name: str, shape: tuple[int, int, int]) -> tuple[int, ...]:
    return shape[:2] if name == "log_rest" else shape


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
