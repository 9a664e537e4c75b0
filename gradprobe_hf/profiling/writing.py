"""The report of a loop in a file, without an error behind the loop: what was trained is worth more."""

from __future__ import annotations

import logging
from pathlib import Path

from gradprobe_hf.profiling.report import ProfileReport

logger = logging.getLogger(__name__)


def make_folder(save: str | Path) -> None:
    """Make the folder of a report, before the loop begins.

    Raises:
        OSError: it cannot be made, or the report is to take the place of a folder.
    """
    if Path(save).is_dir():
        raise IsADirectoryError(f"save={str(save)!r} is a folder: give the name of a file in it, like 'report.md'.")
    Path(save).parent.mkdir(parents=True, exist_ok=True)


def write(report: ProfileReport, save: str | Path) -> None:
    """Save a report; that it cannot be written is a warning."""
    try:
        report.save(save)
    except OSError as error:
        logger.warning("the profile was not written to %s: %s. `report()` still has it", save, error)
    else:
        logger.info("profile: %s", save)
