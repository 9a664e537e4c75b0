"""The `gradprobe` command: one verb per file of `verbs`.

A verb imports what it runs with inside `run`, so that --help does not wait for torch and transformers.
"""

from gradprobe_hf.cli.main import main

__all__ = ["main"]
