"""Workers: a process of its own for each model, so that its peak of memory is its own while they take turns.

The two talk through pipes: a request is the name of a method of `Subject` and its arguments, pickled, and so is the
answer, or the error that is raised again on the other side. `python -m gradprobe_hf.bench.worker` is the process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import gradprobe_hf

STOPPED = 5.0  # seconds that a worker has to end by itself


class Worker:
    """A process with one model.

    Args:
        name: of the model, for errors.
        made_by: the class method of `Subject` that makes it, `"load"` or `"of_config"`.
        values, options: its arguments.

    Raises:
        ValueError, OSError, ...: what making it raises.
    """

    def __init__(self, name: str, made_by: str, *values: Any, **options: Any) -> None:
        self.name = name
        # This package is found as it was found here, wherever that is.
        found = os.pathsep.join([str(Path(gradprobe_hf.__path__[0]).parent), *filter(None, [os.getenv("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gradprobe_hf.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": found},
        )
        try:
            self.ask(made_by, *values, **options)
        except BaseException:
            self.stop()
            raise

    def ask(self, method: str, *values: Any, **options: Any) -> Any:
        """What a method of the subject returns.

        Raises:
            ChildProcessError: the process ended, for want of memory say.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "piped"
        assert stdout is not None, "piped"
        try:
            pickle.dump((method, values, options), stdin)
            stdin.flush()
            answer, error = pickle.load(stdout)
        except (BrokenPipeError, EOFError) as ended:
            code = self._process.wait()
            raise ChildProcessError(
                f"the process of {self.name} ended with exit code {code}; if that is -9, it was out of memory: compare "
                "fewer models at once."
            ) from ended
        if error is not None:
            raise error
        return answer

    def stop(self) -> None:
        """End the process; it ends by itself when nobody asks any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # of one that was killed: what was asked last is still to be sent
                    pipe.close()
        try:
            self._process.wait(STOPPED)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(source: BinaryIO, out: BinaryIO) -> None:
    """Answer requests until there are no more."""
    from gradprobe_hf.bench.subject import Subject

    subject: Any = Subject
    while True:
        try:
            method, values, options = pickle.load(source)
        except EOFError:
            return
        try:
            found = getattr(subject, method)
            answer = found(*values, **options) if callable(found) else found
            if isinstance(answer, Subject):
                subject, answer = answer, None
            answered = pickle.dumps((answer, None))
        except Exception as error:  # whatever it is, it is raised where it was asked for
            answered = pickle.dumps((None, _plain(error)))
        out.write(answered)
        out.flush()


def _plain(error: Exception) -> Exception:
    """The error, if it comes back from a pickle as it is; else one that says the same."""
    try:
        same = pickle.loads(pickle.dumps(error))
        return error if str(same) == str(error) else RuntimeError(str(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    from transformers.utils.logging import disable_progress_bar

    # Whatever a library prints goes to standard error: standard output is for answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    disable_progress_bar()
    try:
        serve(sys.stdin.buffer, out)
    except (KeyboardInterrupt, BrokenPipeError):  # the other side says so
        os._exit(1)


if __name__ == "__main__":
    main()
