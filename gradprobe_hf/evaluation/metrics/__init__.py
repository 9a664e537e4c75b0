"""Measurements for the `evaluate` library that ship with this package and load offline: `evaluate.load(path(name))`."""

from pathlib import Path


def path(name: str) -> str:
    """The folder `evaluate.load` takes, for `"perplexity"`."""
    folder = Path(__file__).parent / name
    if not (folder / f"{name}.py").is_file():
        raise ValueError(f"no measurement called {name!r} ships with gradprobe_hf; there is 'perplexity'.")
    return str(folder)
