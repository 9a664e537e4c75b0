"""What a recovery keeps in its folder: what it is of, so that another run is refused, and checkpoints to go on from.

The best state is there in any case: it is no folder of the user's where the run is not to be resumed.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.estimation.training_state import state_bytes
from gradprobe_hf.model.files.offload_store import existing_parent
from gradprobe_hf.model.parameters import parameter_bytes, parameter_count
from gradprobe_hf.recovery.trainer import BEST_NAME, SECONDS_NAME, BestState, held_out
from gradprobe_hf.runtime.option_checks import is_within
from gradprobe_hf.runtime.processes import Processes

IDENTITY_NAME = "recovery.json"
PREDICTIONS = "teacher"
# What safetensors writes and then renames: a kill leaves it, as large as the best state.
_UNFINISHED = ".tmp??????"
# All that a recovery writes in its folder; what others write by such names, too, is ours with our identity beside it.
_IDENTITY_PARTIAL = f"{IDENTITY_NAME}.partial"
_OWN, _SHARED = (IDENTITY_NAME, _IDENTITY_PARTIAL, BEST_NAME, PREDICTIONS, "own_text-*"), ("checkpoint-*", _UNFINISHED)
# Files that tell whether a folder can be written to, and is seen by all processes: another one's, or left by a kill.
_TRIED = (".gradprobe-*", ".seen-*")

_NAMED = "choose another resume_dir (--resume-dir)"
_TEMPORARY = "name a folder with more room in the environment variable TMPDIR"


def check_state_fits(
    folder: Path | None, model: nn.Module, config: RecoveryConfig, output_dir: str | Path | None = None
) -> None:
    """Raise OSError, before any text is written, where the state of a training does not fit on the disk.

    Args:
        folder: to resume from; None: a temporary one.
        model: that trains.
        output_dir: where it is written while the state in `folder` is still there.
    """
    if config.lora_r is not None:  # adapters are small
        return
    where = existing_parent((folder or Path(tempfile.gettempdir())).absolute())
    there = 0
    if folder is not None:
        kept = [folder / BEST_NAME, *folder.glob(_UNFINISHED), *folder.glob("checkpoint-*/*")]
        there = sum(path.stat().st_size for path in kept if path.is_file())
    needed = state_bytes(config, parameter_count(model), resumable=folder is not None) - there
    free = shutil.disk_usage(where).free
    beside = folder is not None and output_dir is not None and _on_one_disk(where, output_dir)
    needed += parameter_bytes(model) if beside else 0
    if free < needed:
        needs = " and the checkpoint need" if beside else " needs"
        raise OSError(
            errno.ENOSPC,
            f"the state of the training{needs} about {needed / 1e6:,.0f} MB there and {free / 1e6:,.0f} MB are free: "
            f"{_TEMPORARY if folder is None else _NAMED}",
            str(where),
        )


def _on_one_disk(where: Path, output_dir: str | Path) -> bool:
    return existing_parent(Path(output_dir).absolute()).stat().st_dev == where.stat().st_dev


@contextmanager
def disk_errors(folder: Path, resumable: bool) -> Iterator[None]:
    """A disk that is full as an OSError that says what would help: to safetensors and to torch it is another error."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if not isinstance(error, SafetensorError) and "inline_container" not in str(error):  # torch.save's file format
            raise
        raise OSError(
            f"the state of the training cannot be written in {folder}: {str(error).splitlines()[0]}. To have more "
            f"room, {_NAMED if resumable else _TEMPORARY}."
        ) from error


def check_own(folder: Path, output_dir: str | Path | None) -> None:
    """Raise ValueError where a folder holds what no recovery wrote, or is to: it is removed when a recovery is done.

    A Trainer's own checkpoints have the names of ours: those without our identity beside them are not.
    """
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    own = (*_OWN, *_SHARED, *_TRIED) if IDENTITY_NAME in inside else (*_OWN, *_TRIED)
    if others := sorted(name for name in inside if not any(fnmatch(name, pattern) for pattern in own)):
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"resume_dir (--resume-dir): {folder} holds {shown}, which no recovery wrote, and is removed when one is "
            "done. Choose a folder of its own."
        )
    if is_within(output_dir, folder):
        raise ValueError(
            f"output_dir={str(output_dir)!r} (--output) is in {folder}, which is removed when the recovery is done: "
            "choose another one, or another resume_dir (--resume-dir)."
        )


def check_begun(folder: Path, config: RecoveryConfig, processes: Processes, **of: str) -> None:
    """Raise ValueError where a folder holds the state of another run, as far as that is known yet. A collective.

    Args:
        of: fingerprints of what has been read: its `weights`, its `teacher`, its `text`.
    """
    processes.on_main(lambda: _check_identity(folder / IDENTITY_NAME, _identity(config, processes, of), of))


def checkpoint_to_resume(
    folder: Path, config: RecoveryConfig, processes: Processes, of: Mapping[str, str]
) -> str | None:
    """The last whole checkpoint in the folder, after a check that it is of this run; None: there is none.

    Args:
        of: fingerprints of all that the run is of.

    Raises:
        ValueError: it is of another run.
    """
    check_begun(folder, config, processes, **of)
    chosen = processes.on_main(lambda: _begun(folder, _identity(config, processes, of)))
    return None if chosen is None else str(chosen)


def seconds_until(checkpoint: str | None) -> dict[str, float]:
    """Those of each stage that led to a checkpoint, of all calls; what was spent behind it is lost."""
    path = None if checkpoint is None else Path(checkpoint) / SECONDS_NAME
    return {} if path is None or not path.exists() else dict(json.loads(path.read_text(encoding="utf-8")))


def ended_state(checkpoint: str | None, config: RecoveryConfig, best: BestState) -> TrainerState | None:
    """The state in a checkpoint behind which nothing is trained, where it is that; Trainer would take one more step."""
    if checkpoint is None:
        return None
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    is_last = state.global_step >= config.steps or best.has_waited(held_out(state.log_history))
    return state if is_last else None


def _begun(folder: Path, identity: Mapping[str, Any]) -> Path | None:
    """The last whole checkpoint of a run that is begun here, if it has not been before; half a best state goes."""
    for unfinished in folder.glob(_UNFINISHED):
        unfinished.unlink()
    path = folder / IDENTITY_NAME
    if not path.exists():
        unfinished = path.with_name(_IDENTITY_PARTIAL)
        unfinished.write_text(json.dumps(identity), encoding="utf-8")
        unfinished.replace(path)  # a kill leaves it whole or not at all
    # Trainer writes its state last: what has none was being written when the run was killed.
    whole = [one for one in folder.glob("checkpoint-*") if _is_whole(one)]
    return max(whole, key=lambda one: int(one.name.split("-")[-1]), default=None)


def remove_state(folder: Path) -> None:
    """Remove the folder of a recovery that is done. Killed meanwhile, the same call goes on, or begins anew: what says
    that a checkpoint is whole goes before it, and what says whose they are goes last."""
    for state in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}"):
        state.unlink(missing_ok=True)
    for one in folder.iterdir():
        if one.is_dir():
            shutil.rmtree(one, ignore_errors=True)
        elif one.name != IDENTITY_NAME:
            one.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_whole(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):  # not there, or cut off
        return False


def _identity(config: RecoveryConfig, processes: Processes, of: Mapping[str, str]) -> dict[str, Any]:
    """What a state is of, in JSON types: how often it is saved may change between two runs."""
    options = {name: value for name, value in config.to_dict().items() if name != "save_steps"}
    return {**options, **of, "processes": processes.count}


def _check_identity(path: Path, identity: Mapping[str, Any], of: Mapping[str, str]) -> None:
    if not path.exists():
        return
    try:
        kept = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete its folder, and the run begins anew.") from error
    differing = [name for name, value in identity.items() if kept.get(name) != value]
    if differing:
        name = differing[0]
        shown = "" if name in of else f" ({kept.get(name)!r} there, {identity[name]!r} here)"
        raise ValueError(
            f"{path.parent} holds the state of another run: {', '.join(differing)} differ{shown}. Go on with the same "
            "arguments, or choose another resume_dir (--resume-dir)."
        )
