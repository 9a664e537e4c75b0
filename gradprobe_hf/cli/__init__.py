"""The `gradprobe` command: one verb per file."""

from gradprobe_hf.cli.main import main

__all__ = ["main"]
