"""Scripts in processes of their own that begin as forks: what they import is there already.

An interpreter takes five seconds to import torch and transformers; a test that starts one for each case does little
else. `run` forks this process. What has to be known before the imports, an endpoint of the Hub say, belongs to an
`Interpreter`: started once with its environment, it forks for each script.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ran:
    """What became of a script."""

    returncode: int
    stdout: str
    stderr: str


def run(
    script: str | Path, *arguments: object, cwd: str | Path = ".", environment: Mapping[str, str | None] | None = None
) -> Ran:
    """Run a script in a fork.

    Args:
        script: a file, or Python code.
        environment: more variables; None: not that one.
    """
    running = start(script, *arguments, cwd=cwd, environment=environment)
    return running.wait()


@dataclass(frozen=True)
class Running:
    """A script that has been started, and the folder of what it prints."""

    pid: int
    folder: tempfile.TemporaryDirectory

    def wait(self) -> Ran:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = [Path(self.folder.name, name).read_text(encoding="utf-8") for name in ("out", "err")]
        self.folder.cleanup()
        return Ran(code, *said)


def start(
    script: str | Path, *arguments: object, cwd: str | Path = ".", environment: Mapping[str, str | None] | None = None
) -> Running:
    folder = tempfile.TemporaryDirectory(prefix="script-")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _become(Path(folder.name), environment or {}, cwd)
            code = _run(script, [*map(str, arguments)])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # nothing of the parent's is cleaned up here
    return Running(child, folder)


def _become(folder: Path, environment: Mapping[str, str | None], cwd: str | Path) -> None:
    """A process that was started by itself: its own streams, variables and folder, and no handler of another's."""
    for number, name in ((0, os.devnull), (1, folder / "out"), (2, folder / "err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    logging.getLogger().handlers.clear()
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    os.chdir(cwd)
    if "torch" in sys.modules:
        import torch

        # The first call in a fork replaces PyTorch's pool of threads; two threads that are first together find none.
        torch.set_num_threads(torch.get_num_threads())
    if "accelerate" in sys.modules:  # what it found out about the parent's variables
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _run(script: str | Path, arguments: list[str]) -> int:
    try:
        if isinstance(script, Path):
            sys.argv = [str(script), *arguments]
            runpy.run_path(str(script), run_name="__main__")
        else:
            sys.argv = ["-c", *arguments]
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Interpreter:
    """A Python with an environment of its own, which runs one script after another."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def run(
        self, script: str | Path, *arguments: object, cwd: str | Path = ".", environment: Mapping | None = None
    ) -> Ran:
        """As the function of that name."""
        call = {
            "script": str(script),
            "is_file": isinstance(script, Path),
            "arguments": [*map(str, arguments)],
            "cwd": str(cwd),
            "environment": environment,
        }
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return Ran(**json.loads(self.process.stdout.readline()))


@contextmanager
def interpreter(**environment: str) -> Iterator[Interpreter]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.scripts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    try:
        yield Interpreter(started)
    finally:
        started.kill()  # closing its stdin is not enough: forks that were made since hold the other end, too
        started.wait()
        started.stdin.close()
        started.stdout.close()


def _serve() -> None:
    import gradprobe_hf.cli.main
    import gradprobe_hf.pruning
    import gradprobe_hf.report.plots  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        call = json.loads(line)
        script = Path(call["script"]) if call["is_file"] else call["script"]
        found = run(script, *call["arguments"], cwd=call["cwd"], environment=call["environment"])
        answers.write(json.dumps(asdict(found)) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
