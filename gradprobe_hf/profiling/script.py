"""Run a training script with a recorder around whatever loop is in it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate.utils.memory import clear_device_cache

from gradprobe_hf.profiling.as_main import Observed, as_main
from gradprobe_hf.profiling.fixing.batch_sizes import BatchSizes, expanded, try_batch_sizes, unknown_room, with_gains
from gradprobe_hf.profiling.fixing.changes import LARGEST
from gradprobe_hf.profiling.fixing.fixes import in_processes, try_changes
from gradprobe_hf.profiling.observing.joined import watching
from gradprobe_hf.profiling.observing.recorder import Recorder
from gradprobe_hf.profiling.observing.schedule import Schedule
from gradprobe_hf.profiling.report import ProfileReport


@dataclass(frozen=True)
class ScriptRun:
    """Attributes:
    report: of what was seen, however the script ended.
    exit_code: 0 if it came to its end, or was ended behind the last step of the schedule.
    interrupted: by Ctrl-C.
    """

    report: ProfileReport
    exit_code: int
    interrupted: bool = False


def profile_script(path: str, arguments: Sequence[str], schedule: Schedule, whole_run: bool = False) -> ScriptRun:
    """Run a script as `python path arguments` does, in this process.

    Args:
        whole_run: let it run to its end. Default: it is ended as soon as all steps of the schedule were seen.

    Raises:
        OSError: there is no such script.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no script {path!r}.")
    recorder = Recorder(schedule, finished=None if whole_run else _end)
    code, interrupted = 0, False
    with as_main(path, arguments), watching(recorder):
        recorder.start()
        try:
            runpy.run_path(path, run_name="__main__")
        except Observed:
            pass
        except KeyboardInterrupt:
            interrupted = True
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)  # what Python would do, and the script's only word on why it ended
        except Exception:
            traceback.print_exc()  # the script's own error, in its own words
            code = 1
        finally:
            recorder.stop()
    return ScriptRun(ProfileReport(recorder.observation()), code, interrupted)


def fix_script(
    report: ProfileReport, path: str, arguments: Sequence[str], schedule: Schedule, names: Sequence[str], rounds: int
) -> ScriptRun:
    """The report of a script with what came of changes from outside, each tried in runs of its own.

    Args:
        report: of the script as it is.
        names: of changes.
        rounds: how often each is tried.
    """
    seen, sizes = report.observation, BatchSizes((), "")
    clear_device_cache(garbage_collection=True)  # of the run before, in this process: the trials have what is left
    runs = in_processes(path, arguments, schedule)
    if LARGEST in names:
        try:
            if (why := unknown_room(seen)) is None:
                sizes = try_batch_sizes(runs)
            else:
                seen = replace(seen, missing={**seen.missing, "batch headroom": why})
        except KeyboardInterrupt:
            return ScriptRun(report, 0, interrupted=True)
    tried = try_changes(runs, seen, expanded(names, sizes), rounds)
    return ScriptRun(ProfileReport(with_gains(sizes, tried.fixes, seen), tried.fixes), 0, tried.interrupted)


def _end() -> None:
    raise Observed
