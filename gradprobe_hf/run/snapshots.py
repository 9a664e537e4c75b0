"""Resume: the state of a run in a folder, so that a run that was killed goes on where it was and ends the same.

    <folder>/process-<rank>/<stage>-<batches>/     one complete state; it appears by a rename, whole or not at all
        progress.json       stage, batches done, losses so far, and what the run was of
        candidates.safetensors, served.safetensors: masks
        <role>-<number>.safetensors for the sums of each matrix

Every process keeps its own state, because each has probed other batches. The state of a stage is dropped only when all
processes have one of the next, so that there always is a stage that all of them can go on from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.engine import Tally
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.runtime.interrupts import uninterrupted
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.selection.packed_masks import PackedMasks

MASKS = ("served", "candidates")
SAMPLED_ROWS = 2  # of each matrix: enough to tell two models apart, and not to read 14 GB


@dataclass
class ProbeState:
    """Where a run is.

    Attributes:
        number: which probe of the run is under way, or finished with the decision after it still open.
        tally: the losses of its batches so far.
        statistics: every set of statistics by its role ("first", or "after" of the threshold decision).
        candidates: the masks the second probe of a trial shrinks.
        served: the masks of what is pruned already.
        notes: JSON values of the stages before, for the report.
    """

    number: int
    tally: Tally
    statistics: dict[str, Statistics]
    candidates: PackedMasks | None = None
    served: PackedMasks = field(default_factory=PackedMasks)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        return f"probe {self.number}"


class Snapshots:
    """Writes and reads the state of one process.

    Args:
        folder: shared by all processes.
        identity: what the run is of, as JSON values: a state of anything else is refused.
        save_every: batches between two states.
        in_step: whether a batch is a matter of all processes, as of a sharded model: then all go on from one position.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], save_every: int, processes: Processes, in_step: bool = False
    ) -> None:
        self.folder, self.identity, self.save_every = folder, dict(identity), save_every
        self.processes, self.in_step = processes, in_step
        self.own = _folder_of(folder, processes)

    def check(self) -> None:
        """Raise ValueError when the folder holds the state of another run, naming the first difference."""
        for state in self._states():
            kept = json.loads((state / "progress.json").read_text(encoding="utf-8"))["identity"]
            for name in [*self.identity, *kept]:
                before, now = kept.get(name), self.identity.get(name)
                if before != now:
                    raise ValueError(
                        f"{self.folder} holds the state of another run: its {name} was {before!r}, now it is {now!r}. "
                        "Go on with the same settings, or choose another resume_dir (--resume-dir), or delete it."
                    )

    def latest(self) -> int | None:
        """The number of the probe that every process can go on from; None when one of them has no state."""
        own = max((_number_of(state) for state in self._states()), default=-1)
        number = int(self.processes.min_(torch.tensor(own)))
        return None if number < 0 else number

    def masks(self, number: int) -> tuple[PackedMasks, PackedMasks | None]:
        """What was pruned already when a probe began, and the candidates that were known then."""
        return self._masks(max((s for s in self._states() if _number_of(s) == number), key=_position))

    def _masks(self, state: Path) -> tuple[PackedMasks, PackedMasks | None]:
        found = [_load_masks(path) if (path := state / f"{name}.safetensors").exists() else None for name in MASKS]
        return found[0] or PackedMasks(), found[1]

    def recall(self, progress: ProbeState) -> None:
        """Fill `progress`, made for its stage by the caller, with the newest state of that stage."""
        states = {_position(state): state for state in self._states() if _stage_of(state) == progress.stage}
        position = max(states)
        if self.in_step:
            position = int(self.processes.min_(torch.tensor(position)))
            for later in (state for at, state in states.items() if at > position):
                _drop(later)  # it will be made again
        state = states[position]
        kept = json.loads((state / "progress.json").read_text(encoding="utf-8"))
        for loss, terms in zip(kept["losses"], kept["terms"], strict=True):
            progress.tally.add(torch.tensor(float.fromhex(loss), dtype=torch.float64), torch.tensor(terms))
        progress.notes.update(kept["notes"])
        for role, statistics in progress.statistics.items():
            statistics.load_state(kept["statistics"][role], partial(_load_matrix, state, role))
        progress.served, progress.candidates = self._masks(state)

    def record(self, progress: ProbeState) -> None:
        """Write a state beside the last one, then drop the last one of the same stage."""
        self.own.mkdir(parents=True, exist_ok=True)
        path = self.own / f"{progress.stage}-{len(progress.tally)}"
        if path.exists():
            return
        for unfinished in self.own.glob("*.partial"):
            shutil.rmtree(unfinished)
        scratch = path.with_name(path.name + ".partial")
        try:
            scratch.mkdir()
            self._write(progress, scratch)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if isinstance(error, SafetensorError):  # what a full disk is to safetensors
                raise OSError(
                    f"the state of the run cannot be saved in {self.folder}: {error}. Choose another resume_dir "
                    "(--resume-dir)."
                ) from error
            raise
        older = [state for state in self._states() if _stage_of(state) == progress.stage]
        scratch.rename(path)
        if self.in_step:  # nobody lets go of what another may have to go back to
            self.processes.wait()
        for state in older:
            _drop(state)

    def _write(self, progress: ProbeState, scratch: Path) -> None:
        for name, masks in zip(MASKS, (progress.served, progress.candidates), strict=True):
            if masks:
                _save_masks(masks, scratch / f"{name}.safetensors")
        described = {}
        for role, statistics in progress.statistics.items():
            described[role], tensors = statistics.state()
            for index, parts in enumerate(tensors):
                if parts:
                    save_file(parts, scratch / f"{role}-{index}.safetensors")
        values = {
            "identity": self.identity,
            "losses": [float(loss).hex() for loss in progress.tally.losses],
            "terms": [int(terms) for terms in progress.tally.terms],
            "notes": progress.notes,
            "statistics": described,
        }
        (scratch / "progress.json").write_text(json.dumps(values), encoding="utf-8")
        _flush(scratch)

    def enter(self, progress: ProbeState) -> None:
        """Record the beginning of a stage; when every process has, drop the stage before."""
        self.record(progress)
        self.processes.wait()
        for state in self._states():
            if _stage_of(state) != progress.stage:
                _drop(state)

    def finish(self) -> None:
        """The run is done, in all processes: its state is of no more use. Nothing fails any more."""
        with uninterrupted(), suppress(OSError):
            shutil.rmtree(self.own, ignore_errors=True)
            self.folder.rmdir()  # not where others are not done with theirs, or have just done this

    def _states(self) -> list[Path]:
        return _states_in(self.own)


def run_identity(
    model: nn.Module,
    targets: Sequence[Target],
    config: Mapping[str, Any],
    batches: Batches,
    processes: Processes,
) -> dict[str, Any]:
    """What a state belongs to: configuration, calibration data, model and number of processes."""
    return {
        **{f"config.{name}": value for name, value in config.items()},
        "calibration": f"{batches.source} ({batches.fingerprint})",
        "batches": len(batches),
        "rows at once": max(map(row_count, batches)),
        "model": type(model).__name__,
        "weights": _weights_fingerprint(model, targets),
        "number of processes": processes.count,
    }


def kept_rows(folder: str | Path, processes: Processes) -> int | None:
    """How many sequences a batch has in the run whose state is in the folder; None where there is none."""
    states = _states_in(_folder_of(folder, processes))
    kept = json.loads((states[0] / "progress.json").read_text(encoding="utf-8"))["identity"] if states else {}
    return int(processes.max_(torch.tensor(kept.get("rows at once", 0)))) or None


def _folder_of(folder: str | Path, processes: Processes) -> Path:
    return Path(folder) / f"process-{processes.rank}"


def _states_in(own: Path) -> list[Path]:
    """The complete ones."""
    return [path for path in own.glob("*-*") if path.suffix != ".partial"] if own.is_dir() else []


def check_save_every(save_every: int) -> None:
    if not isinstance(save_every, int) or isinstance(save_every, bool) or save_every < 1:
        raise ValueError(f"save_every must be a whole number of batches >= 1, got {save_every!r}.")


def _weights_fingerprint(model: nn.Module, targets: Sequence[Target]) -> str:
    digest = sha256()
    for target in targets:
        matrix = target.matrix(model)
        digest.update(f"{target.name} {tuple(target.shape)} {matrix.dtype}".encode())
        sample = matrix[:SAMPLED_ROWS].contiguous().cpu()
        digest.update(sample.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _load_matrix(state: Path, role: str, index: int) -> dict[str, Tensor]:
    return load_file(state / f"{role}-{index}.safetensors")


def _save_masks(masks: PackedMasks, path: Path) -> None:
    columns = json.dumps({name: masks.columns(name) for name in masks})
    save_file({name: masks.packed(name) for name in masks}, path, metadata={"columns": columns})


def _load_masks(path: Path) -> PackedMasks:
    masks = PackedMasks()
    with safe_open(path, framework="pt") as file:
        columns = json.loads(file.metadata()["columns"])
        for name, width in columns.items():  # in the order in which they were selected
            masks.add_packed(name, file.get_tensor(name).clone(), width)
    return masks


def _flush(folder: Path) -> None:
    """On the disk before the rename that makes it the state: a power cut must not leave a name without content."""
    for path in folder.iterdir():
        with open(path, "r+b") as file:  # Windows flushes none that is open for reading
            os.fsync(file.fileno())


def _drop(state: Path) -> None:
    """Out of the way by a rename first: a kill in the middle must not leave half a state under its name."""
    unfinished = state.with_name(state.name + ".partial")
    state.rename(unfinished)
    shutil.rmtree(unfinished)


def _stage_of(state: Path) -> str:
    return state.name.rsplit("-", 1)[0]


def _number_of(state: Path) -> int:
    return int(_stage_of(state).split()[1])


def _position(state: Path) -> int:
    return int(state.name.rsplit("-", 1)[1])
