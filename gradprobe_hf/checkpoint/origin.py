"""Where a checkpoint comes from: its report and configuration, and whether a dense model can be what it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download

from gradprobe_hf.config.config import CONFIG_NAME, GradProbeConfig
from gradprobe_hf.model.loading.load import Loaded
from gradprobe_hf.report.build import published_name
from gradprobe_hf.report.original import DENSE, original_of
from gradprobe_hf.report.report import REPORT_NAME, Report
from gradprobe_hf.runtime.paths import looks_like_path

_UNNAMED = "default"  # PEFT's name for an adapter that was given none


def stored_report(name: str, source: Mapping[str, Any]) -> tuple[Report | None, GradProbeConfig | None]:
    """The report and the configuration of a checkpoint's pruning; None of one that something else has made.

    What something else has pruned, and was recovered here, has a report alone.

    Args:
        name: a folder, or a Hub id.
        source: keyword arguments of `from_pretrained`: `subfolder`, `revision`, `token` and `cache_dir` count.
    """
    inside = source.get("subfolder") or ""
    folder = Path(name)
    if not folder.is_dir():
        if looks_like_path(name):
            return None, None
        of_hub = {key: source[key] for key in ("revision", "token", "cache_dir") if key in source}
        wanted = [str(PurePosixPath(inside, file)) for file in (REPORT_NAME, CONFIG_NAME)]
        folder = Path(snapshot_download(name, allow_patterns=wanted, **of_hub))
    folder = folder / inside
    if not (folder / REPORT_NAME).is_file():
        return None, None
    has_config = (folder / CONFIG_NAME).is_file()
    return Report.load(folder), GradProbeConfig.from_pretrained(folder) if has_config else None


def another_than(report: Report | None, dense: Loaded) -> str | None:
    """What was pruned, where a dense model is called otherwise; None: it may be that, or nobody knows.

    Args:
        report: of the pruned model. Of one with an adapter folded in `check_made_of` knows more.
    """
    # Of a model that had been pruned before, the report does not say what the dense one was.
    if report is None or report.model.get("adapter") is not None or original_of(report.model) != DENSE:
        return None
    made_of, given = (str(name or "") for name in (report.model.get("name"), published_name(dense.model)))
    is_same = PurePosixPath(made_of).name.lower() == PurePosixPath(given).name.lower()
    return None if is_same or not made_of else made_of


def check_made_of(report: Report | None, dense: Loaded, argument: str, in_memory: bool = False) -> list[str]:
    """What speaks against a dense model as what was pruned, where an adapter had been folded into that.

    Args:
        report: of the pruned model; None: nothing is known.
        argument: what named the dense model.
        in_memory: it has been loaded before, so that an adapter may be part of its weights already.

    Raises:
        ValueError: it is the base alone.
    """
    adapter = None if report is None else report.model.get("adapter")
    if report is None or adapter is None:
        return []
    base = report.model.get("adapter_of", report.model["name"])
    made = f"what was pruned is {base!r} with the adapter {adapter!r} folded in"
    if dense.adapter is not None:
        given = dense.origin["adapter"]
        # In memory adapters have no name that says where they are from.
        if in_memory or adapter == _UNNAMED or Path(given).name == Path(adapter).name:
            return []
        # Reports are published: no path of an argument in them.
        return [
            f"W{made[1:]}, and the dense model has {given!r}: if that is another adapter, it is not what was pruned."
        ]
    if published_name(dense.model) != base:
        return []
    if in_memory:
        return [
            f"W{made[1:]}, and {argument} is called {base!r}: see that its weights have the adapter in them, too. "
            "Given as a PeftModel, or by its name, it is folded in here."
        ]
    raise ValueError(f"{made}, and {argument} is {base!r} without it: give the adapter, which is folded in here, too.")
