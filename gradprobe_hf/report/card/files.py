"""What a card says of the files: how large they are, as they are and compressed."""

from __future__ import annotations

from gradprobe_hf.report.report import Report

_WAYS = {"zstd": "under zstd", "hub": "as the Hub transfers it"}


def size_of_files(report: Report) -> dict[str, str] | None:
    """Megabytes of the weights on the disk, and compressed as far as that was measured."""
    if report.files is None:
        return None
    dense = _shown(report.files, "dense", "dense_") + in_another_type(report)
    return {"dense": dense, "stored": _shown(report.files, "bytes", "")}


def in_another_type(report: Report) -> str:
    """Behind the dense model's size: that of its weights as they were loaded, where its files have another plain type.

    What is `stored_as` a quantised one may have been dequantised before, and saved so.
    """
    is_other = report.recovered_towards is None and "converted_from" in report.model
    return f", as {report.model['dtype']}" if is_other else ""


def _shown(files: dict[str, int | None], stored: str, prefix: str) -> str:
    compressed = {way: files.get(prefix + name) for name, way in _WAYS.items()}  # not all in reports of before
    shown = ", ".join(f"{_megabytes(size)} {way}" for way, size in compressed.items() if size is not None)
    return _megabytes(files[stored] or 0) + (f" ({shown})" if shown else "")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"
