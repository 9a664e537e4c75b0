"""The torch.profiler of the traced steps, made by Accelerate: as the run's own Accelerator was told to, if it was."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

from accelerate import Accelerator
from accelerate.utils import PROFILE_PATTERN_NAME, ProfileKwargs
from torch.profiler import profile


class Tracer:
    """One recording.

    Of `Accelerator(kwargs_handlers=[ProfileKwargs(...)])` everything counts but its schedule: which steps are recorded
    is the recorder's to say.
    """

    def __init__(self) -> None:
        self._accelerator = _told_how()
        handler = self._accelerator.profile_handler if self._accelerator is not None else ProfileKwargs()
        self._folder = handler.output_trace_dir
        self.profiler: profile = replace(handler, schedule_option=None).build()

    def start(self) -> None:
        """Raises: RuntimeError: another profiler is running."""
        self.profiler.start()

    def stop(self) -> None:
        """And write the trace, where it was told to."""
        self.profiler.stop()
        if self._folder is not None and self._accelerator is not None:
            os.makedirs(self._folder, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=self._accelerator.process_index)
            self.profiler.export_chrome_trace(os.path.join(self._folder, name))


def _told_how() -> Accelerator | None:
    """An Accelerator of this process that has a ProfileKwargs; nothing keeps a list of them."""
    made = (one for one in gc.get_objects() if issubclass(type(one), Accelerator))
    return next((one for one in made if getattr(one, "profile_handler", None) is not None), None)
