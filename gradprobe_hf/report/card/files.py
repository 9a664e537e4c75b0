"""What a card says of the files: how large they are, as they are and compressed."""

from __future__ import annotations

from gradprobe_hf.report.report import Report


def size_of_files(report: Report) -> dict[str, str] | None:
    """Megabytes of the weights on the disk, and under zstd where that was measured."""
    if report.files is None:
        return None
    shown = {name: None if size is None else f"{size / 1e6:,.1f}" for name, size in report.files.items()}
    stored = f"{shown['bytes']}" + (f" ({shown['zstd']} under zstd)" if shown["zstd"] else "")
    return {"dense": f"{shown['dense']}", "stored": stored}
