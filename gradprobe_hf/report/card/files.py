"""What a card says of the files: how large they are, as they are and compressed."""

from __future__ import annotations

from gradprobe_hf.report.report import Report


def size_of_files(report: Report) -> dict[str, str] | None:
    """Megabytes of the weights on the disk, and compressed as far as that was measured."""
    if report.files is None:
        return None
    shown = {name: f"{size / 1e6:,.1f}" for name, size in report.files.items() if size is not None}
    ways = {"zstd": "under zstd", "hub": "as the Hub transfers it"}
    compressed = ", ".join(f"{shown[name]} {way}" for name, way in ways.items() if name in shown)
    return {"dense": shown["dense"], "stored": shown["bytes"] + (f" ({compressed})" if compressed else "")}
