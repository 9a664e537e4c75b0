"""Snapshots: the state of a run in a folder, so that a run that was killed goes on where it was and ends the same.

    <folder>/process-<rank>/<stage>-<number>-<position>/     one complete state: it appears by a rename, whole or not
        state.json                  what the run is of, and the JSON values of the state
        <part>.safetensors          its tensors, in as many parts as the stage likes to write one after the other

A run passes its stages in the order of `STAGES`. A search is saved whenever it has measured one more thing; a probe
every so many batches, its position; the decision once; reconstruction once for each block, beside the decision. Every
process keeps states of its own, because each has probed other batches. The states of a stage are dropped only when all
processes have one of the next, so that there always is a step that all of them can go on from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.estimation.peak import higher, peak_memory
from gradprobe_hf.model.fingerprint import model_fingerprint
from gradprobe_hf.runtime.interrupts import uninterrupted
from gradprobe_hf.runtime.option_checks import function_name
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import Stopwatch

STAGES = ("search", "probe", "decision", "block")
STATE_NAME = "state.json"
_NUMBERS = 10**6  # more than a stage has steps

# The tensors of a state, in parts that need not be in memory together.
Parts = Iterable[tuple[str, Mapping[str, Tensor]]]


@dataclass(frozen=True, order=True)
class Step:
    """A step of a run; steps order as a run passes them.

    Attributes:
        stage_index: in `STAGES`.
        number: which finding, which probe, or which block.
    """

    stage_index: int
    number: int = 0

    @classmethod
    def of(cls, stage: str, number: int = 0) -> Step:
        return cls(STAGES.index(stage), number)

    @property
    def stage(self) -> str:
        return STAGES[self.stage_index]

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.number}"


@dataclass(frozen=True)
class Snapshot:
    """A complete state that was read: its JSON `values`, and its parts when they are asked for."""

    path: Path
    values: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of a part; none of a part that had none."""
        path = self.path / f"{name}.safetensors"
        try:
            return load_file(path) if path.exists() else {}
        except SafetensorError as error:
            raise _damaged(path, error) from error


class Snapshots:
    """Writes and reads the states of one process.

    Args:
        folder: shared by all processes.
        identity: what the run is of, as JSON values: the states of anything else are refused.
        save_every: batches of a probe between two states.
        stopwatch: of the run. A state has its seconds, and those of a run that is resumed are added to them; and its
            highest memory.
        in_step: whether a batch is a matter of all processes, as of a sharded model: then all go on from one position.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        save_every: int,
        processes: Processes,
        stopwatch: Stopwatch,
        in_step: bool = False,
    ) -> None:
        self.folder, self.identity, self.save_every = folder, dict(identity), save_every
        self.processes, self.stopwatch, self.in_step = processes, stopwatch, in_step
        self.own = folder_of(folder, processes)
        self._before: dict[str, int] = {}

    def check(self) -> None:
        """Raise ValueError when the folder holds the state of another run, naming the first difference."""
        self.processes.in_all(self._check)

    def _check(self) -> None:
        _compare(self.folder, self.processes, self.identity)
        # What was spent behind the newest state is lost, with what was made of it.
        states = [_read(state) for state in self._states()]
        latest = max(states, key=lambda state: sum(state["seconds"].values()), default=None)
        if latest is not None:
            self.stopwatch.add(latest["seconds"])
            self._before = latest["memory"]

    def peaks(self) -> dict[str, int]:
        """The highest memory of this process, or of an earlier one whose work goes on here."""
        return higher(peak_memory(), self._before)

    def latest(self) -> Step | None:
        """The last step that every process has a state of; None when one of them has none. A collective."""
        own = max((_step_of(state) for state in self._states()), default=None)
        code = -1 if own is None else own.stage_index * _NUMBERS + own.number
        agreed = int(self.processes.min_(torch.tensor(code)))
        return None if agreed < 0 else Step(*divmod(agreed, _NUMBERS))

    def agreed(self) -> Step | None:
        """As `latest`, and what this process has behind that is dropped: it is made again, by all. A collective.

        Otherwise a process that was ahead would keep what it has, and the others get what is measured now: no two
        clocks, or kernels, are the same.
        """
        latest = self.latest()
        for state in self._states():
            if latest is None or _step_of(state) > latest:
                _drop(state)
        return latest

    def read(self, step: Step) -> Snapshot:
        """The newest state of a step. A collective where processes go on in step."""
        states = {_position(state): state for state in self._states() if _step_of(state) == step}
        if not states:
            raise _damaged(self.own, FileNotFoundError(f"no state of {step.name}"))
        position = max(states)
        if self.in_step:
            position = int(self.processes.min_(torch.tensor(position)))
            for later in (state for at, state in states.items() if at > position):
                _drop(later)  # it will be made again
        return Snapshot(states[position], _read(states[position])["values"])

    def record(
        self, step: Step, values: Mapping[str, Any], parts: Parts, position: int = 0, *, together: bool = True
    ) -> None:
        """Write a state of a step, then drop the earlier ones of the same step.

        Args:
            together: it is a collective: every process is here, and what one cannot write is an error in all. Else, as
                behind a batch of which others may have none, it is one only where all go on in step.

        Raises:
            OSError: it cannot be written; the earlier ones are still there.
        """
        write = partial(self._record, step, values, parts, position)
        # Nor may a process that is in step be without the position before until all have the next.
        older = self.processes.in_all(write) if together or self.in_step else write()
        for state in older:
            _drop(state)

    def _record(self, step: Step, values: Mapping[str, Any], parts: Parts, position: int) -> list[Path]:
        """Write a state of a step. Returns the earlier ones of the same step."""
        self.own.mkdir(parents=True, exist_ok=True)
        path = self.own / f"{step.name}-{position}"
        if path.exists():
            if _read(path)["identity"] != json.loads(json.dumps(self.identity)):
                raise ValueError(
                    f"another run has saved its state in {self.folder} meanwhile: give each its own resume_dir "
                    "(--resume-dir)."
                )
            return []
        for unfinished in self.own.glob("*.partial"):
            shutil.rmtree(unfinished)
        scratch = path.with_name(path.name + ".partial")
        try:
            scratch.mkdir()
            self._write(scratch, values, parts)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if isinstance(error, SafetensorError):  # what a full disk is to safetensors
                raise OSError(
                    f"the state of the run cannot be saved in {self.folder}: {error}. Choose another resume_dir "
                    "(--resume-dir)."
                ) from error
            raise
        older = [state for state in self._states() if _step_of(state) == step]
        scratch.rename(path)  # atomic: a state is there whole or not at all
        return older

    def enter(self, step: Step, values: Mapping[str, Any], parts: Parts) -> None:
        """Record the beginning of a step; when every process has, drop all steps before. A collective."""
        self.record(step, values, parts)
        for state in self._states():
            if _step_of(state) < step:
                _drop(state)

    def finish(self, *shared: str) -> None:
        """The run is done, in all processes: its state is of no more use. Nothing fails any more.

        Args:
            shared: names of folders beside the states of the processes, which all of them see; the main one removes
                them.
        """
        common: list[Path] = []
        if self.processes.is_main:
            common = [self.folder / name for name in shared]
            # Of a run with more processes, whose own states here are gone.
            known = {folder_of(self.folder, replace(self.processes, rank=rank)) for rank in range(self.processes.count)}
            common += [one for one in self.folder.glob("process-*") if one not in known and _is_of_a_process(one)]
        with uninterrupted(), suppress(OSError):
            # The newest first: killed meanwhile, the same call goes on from what is left.
            for state in sorted(self._states(), key=lambda one: (_step_of(one), _position(one)), reverse=True):
                _drop(state)
            for one in (self.own, *common):
                shutil.rmtree(one, ignore_errors=True)
            self.folder.rmdir()  # not where others are not done with theirs, or have just done this

    def _write(self, scratch: Path, values: Mapping[str, Any], parts: Parts) -> None:
        for name, tensors in parts:
            if tensors:
                save_file(dict(tensors), scratch / f"{name}.safetensors")
        spent = {"seconds": self.stopwatch.so_far(), "memory": self.peaks()}
        state = {"identity": self.identity, "values": dict(values), **spent}
        (scratch / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")
        _flush(scratch)

    def _states(self) -> list[Path]:
        return _states_in(self.own)


def run_identity(
    model: nn.Module,
    config: Mapping[str, Any],
    texts: Mapping[str, Batches],
    functions: Mapping[str, Callable[..., Any] | None],
    processes: Processes,
) -> dict[str, Any]:
    """What a state belongs to, whatever its batches are like: configuration, model, number of processes, and texts.

    Args:
        texts: by what they are for; one that is not read yet is empty, and says nothing.
        functions: of the user's own, by argument; they are told apart by their names.
    """
    return {
        # How often a state is saved may change between two runs.
        **{f"config.{name}": value for name, value in config.items() if name != "save_every"},
        "model": type(model).__name__,
        "weights": model_fingerprint(model),
        "number of processes": processes.count,
        **{name: f"{text.source} ({text.fingerprint})" for name, text in texts.items() if text},
        **{name: function_name(one) for name, one in functions.items()},
    }


def batch_identity(batches: Batches) -> dict[str, Any]:
    """What else a state belongs to: how the text is batched, where any is read."""
    return {"batches": len(batches), "rows at once": max(map(row_count, batches), default=0)}


def check_begun(folder: str | Path, identity: Mapping[str, Any], processes: Processes) -> None:
    """Raise ValueError when the folder holds the state of another run, as far as that is known yet."""
    processes.in_all(partial(_compare, Path(folder), processes, identity, partly=True))


def rows_at_once(folder: str | Path, processes: Processes) -> int | None:
    """How many sequences a batch has in the run whose state is in the folder; None where there is none."""
    states = _states_in(folder_of(Path(folder), processes))
    kept = _read(states[0])["identity"] if states else {}
    return int(processes.max_(torch.tensor(kept.get("rows at once", 0)))) or None


def folder_of(folder: Path, processes: Processes) -> Path:
    """Where the states of this process are."""
    return folder / f"process-{processes.rank}"


def _compare(folder: Path, processes: Processes, identity: Mapping[str, Any], partly: bool = False) -> None:
    for state in _states_in(folder_of(folder, processes)):
        kept = _read(state)["identity"]
        for name in identity if partly else [*identity, *kept]:
            before, now = kept.get(name), identity.get(name)
            if before != now:
                raise ValueError(
                    f"{folder} holds the state of another run: its {name} was {before!r}, now it is {now!r}. "
                    "Go on with the same settings, or choose another resume_dir (--resume-dir), or delete it."
                )


def _is_of_a_process(folder: Path) -> bool:
    """Whether a folder holds states, and text that a model wrote, and nothing else: by its name it may be anybody's."""
    own = re.compile(r"[^-]+(-[^-]+)*-\d+-\d+(\.partial)?|own_text\..*|.*\.tmp\w*")
    numbered = re.fullmatch(r"process-\d+", folder.name) is not None
    return numbered and folder.is_dir() and all(own.fullmatch(one.name) for one in folder.iterdir())


def _states_in(own: Path) -> list[Path]:
    """The complete ones."""
    return [path for path in own.glob("*-*-*") if path.suffix != ".partial"] if own.is_dir() else []


def _read(state: Path) -> dict[str, Any]:
    """The JSON values of a state.

    Raises:
        ValueError: they cannot be read.
    """
    path = state / STATE_NAME
    try:
        found = {"memory": {}, **json.loads(path.read_text(encoding="utf-8"))}  # which states of before do not have
        return {name: dict(found[name]) for name in ("identity", "values", "seconds", "memory")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"the state of the run to resume is damaged: {path} ({type(error).__name__}: {error}). Delete its folder, or "
        "choose another resume_dir (--resume-dir): the run then begins anew."
    )


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


def _step_of(state: Path) -> Step:
    stage, number, _ = state.name.rsplit("-", 2)
    return Step.of(stage, int(number))


def _position(state: Path) -> int:
    return int(state.name.rsplit("-", 1)[1])
