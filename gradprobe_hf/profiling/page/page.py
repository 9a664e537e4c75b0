"""The page around the pictures."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from gradprobe_hf.profiling.observing.observation import Observation
from gradprobe_hf.profiling.page.pictures import (
    memory_lines,
    memory_of_stages,
    stacked_bar,
    stretches_of_run,
    stretches_of_steps,
    time_line,
)

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .7rem .3rem 0;
  border-bottom: 1px solid #8884; vertical-align: top; }
td:nth-child(n+3) { overflow-wrap: anywhere; } td:nth-child(3) { min-width: 8em; }
td:first-child { white-space: nowrap; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
svg text.right { text-anchor: end; } svg text.label { fill: #fff; font-weight: 600; } .axis { stroke: currentColor; }
.legend { font-size: 13px; margin-top: .2rem; } .key { margin-right: 1.2rem; white-space: nowrap; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
"""


def page(seen: Observation, shares: Mapping[str, float], summary: Sequence[str], tables: Sequence[Table]) -> str:
    """The whole page."""
    parts = ["<h1>Where the time goes</h1>", *(f"<p>{html.escape(line)}</p>" for line in summary)]
    parts += [
        f"<h2>{title}</h2><p>{html.escape(words)}</p>{picture}" for title, words, picture in _pictures(seen, shares)
    ]
    parts += [_table(title, header, rows) for title, header, rows in tables]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<title>Where the time goes</title></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _pictures(seen: Observation, shares: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(title, a sentence, SVG) of each that there is something for."""
    found = []
    if shares:
        words = "The share of each stage, over the steps that were only timed."
        found.append(("Where a step goes", words, stacked_bar(shares)))
    if seen.spans:
        words = "The last timed steps, one row for each stage."
        found.append(("Time line", words, time_line(stretches_of_steps(seen.spans), list(shares))))
    if seen.run:
        words = "Stages of the run; a stage inside another has a row of its own."
        found.append(("The run's time line", words, time_line(stretches_of_run(seen.run))))
        words = "What the process holds at the end of each stage."
        found.append(("The run's memory", words, memory_of_stages(seen.run)))
    if seen.memory:
        words = "At the end of each step that was observed."
        found.append(("Memory over time", words, memory_lines(seen.memory)))
    return found


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    others = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<h2>{html.escape(title)}</h2><table><tr>{first}</tr>{others}</table>"
