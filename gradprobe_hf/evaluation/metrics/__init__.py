"""Measurements for the `evaluate` library that load offline: `evaluate.load(path("perplexity"))`."""

from pathlib import Path


def path(name: str) -> str:
    """The folder of a measurement, for `evaluate.load`.

    Raises:
        ValueError: no such measurement.
    """
    folder = Path(__file__).parent / str(name)
    if not (folder / f"{name}.py").is_file():
        raise ValueError(f"no measurement called {name!r} ships with gradprobe_hf; there is 'perplexity'.")
    return str(folder)
