"""Run a training script with a recorder around whatever loop is in it."""

from __future__ import annotations

import os
import runpy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradprobe_hf.profiling.as_main import Observed, as_main
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
    with as_main(path, arguments):
        recorder.start()
        try:
            runpy.run_path(path, run_name="__main__")
        except Observed:
            pass
        except KeyboardInterrupt:
            interrupted = True
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()  # the script's own error, in its own words
            code = 1
        finally:
            recorder.stop()
    return ScriptRun(ProfileReport(recorder.observation()), code, interrupted)


def is_main_process() -> bool:
    """Whether this process, of those that a launcher started, is the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def _end() -> None:
    raise Observed
