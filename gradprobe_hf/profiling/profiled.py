"""Profile a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from gradprobe_hf.profiling.observing.joined import Watch, watch_of_script
from gradprobe_hf.profiling.observing.recorder import Recorder
from gradprobe_hf.profiling.observing.schedule import Schedule
from gradprobe_hf.profiling.report import ProfileReport
from gradprobe_hf.profiling.writing import make_folder, write


class Profiler:
    """What `profiled` gives to the loop."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def step(self) -> None:
        """A step has ended. Without it, a step ends with the optimizer's."""
        self._watch.step()

    @property
    def done(self) -> bool:
        """Whether all steps of the schedule were seen; nothing is observed any more."""
        return self._watch.done

    def report(self) -> ProfileReport:
        """Of what was seen so far."""
        return ProfileReport(self._watch.observation())


@contextmanager
def profiled(
    model: nn.Module | None = None, *, schedule: Schedule | None = None, save: str | Path | None = None
) -> Iterator[Profiler]:
    """Find out where the time of a training loop goes.

    In a script under `gradprobe profile script` the loop's steps count there, with the schedule of the command, and
    nothing is saved here.

    Args:
        model: whose forward pass is a stage. Default: what holds the parameters of the first optimizer that steps.
        schedule: how many steps are observed, and how. Behind them the loop runs unobserved.
        save: file for the report, Markdown if it ends in .md, a page if in .html, JSON otherwise. It is written however
            the loop ends, into a folder that is made when it begins; what cannot be written then is a warning.

    Yields:
        A `Profiler`, whose `report()` is good during the loop and behind it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> rows = torch.utils.data.DataLoader(torch.randn(30, 8))
        >>> with profiled(model) as profiler:
        ...     for batch in rows:
        ...         loss = model(batch).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> list(profiler.report().shares)
        ['data loading', 'forward', 'backward', 'optimizer', 'other']
    """
    if (script := watch_of_script()) is not None:
        if model is not None:
            script.follow(model)
        yield Profiler(script)
        return
    if save is not None:
        make_folder(save)
    recorder = Recorder(schedule or Schedule(), model)
    profiler = Profiler(recorder)
    recorder.start()
    try:
        yield profiler
    finally:
        recorder.stop()
        if save is not None:
            write(profiler.report(), save)
