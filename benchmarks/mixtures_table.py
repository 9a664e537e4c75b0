"""The table of `mixtures.py`: results -> Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.quality_tables import geometric_mean

NAMED = {"own": "the model's own text", "WikiText-2": "WikiText-2, as the user's"}
AND = " + "


def mixtures_table(results: dict[str, Any]) -> str:
    """Perplexity on each text by sparsity, preset and calibration text, best first by the mean ratio to the dense."""
    dense, rows = results["dense"], results["rows"]
    lines = [
        f"| sparsity, preset | calibrated on | {' | '.join(dense)} | mean ratio to dense |",
        "|---|---|" + "---:|" * (len(dense) + 1),
        f"| dense | | {' | '.join(f'{value:.2f}' for value in dense.values())} | |",
    ]
    for sparsity, preset in dict.fromkeys((row["sparsity"], row["preset"]) for row in rows):
        alike = [row for row in rows if (row["sparsity"], row["preset"]) == (sparsity, preset)]
        best = {name: min(row["perplexity"][name] for row in alike) for name in dense}
        for row in sorted(alike, key=lambda row: _ratio(row, dense)):
            shown = [_marked(row["perplexity"][name], best[name]) for name in dense]
            shown.append(_marked(_ratio(row, dense), min(_ratio(other, dense) for other in alike)))
            lines.append(f"| {sparsity:.0%}, `{preset}` | {_named(row['text'])} | {' | '.join(shown)} |")
    settings = results["settings"]
    measured = ", ".join(f"{found['text']} of {name}" for name, found in settings["evaluation"].items())
    note = (
        f"{settings['model']}, {settings['dtype']}; calibration {settings['calibration']}, mixtures in equal shares; "
        f"evaluation {measured}. Made by `make bench-mixtures`."
    )
    return "\n".join([*lines, "", note])


def _ratio(row: dict[str, Any], dense: dict[str, float]) -> float:
    """The geometric mean of the perplexities' ratios to the dense model's."""
    return geometric_mean([row["perplexity"][name] / value for name, value in dense.items()])


def _marked(value: float, best: float) -> str:
    return f"**{value:.2f}**" if value == best else f"{value:.2f}"


def _named(text: str) -> str:
    parts = text.split(AND)
    if len(parts) == 1:
        return NAMED.get(text, text)
    return AND.join("own text" if part == "own" else part for part in parts)
