"""Pictures as inline SVG. Every one has a sentence in front of it, and its numbers stand in the tables, too."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradprobe_hf.profiling.observing.observation import MemorySample, RunStage, Span

WIDTH = 860
_LEFT, _ROW = 150, 26  # pixels: of the names on the left, and of a row
# Told apart by the colour-blind.
_COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#aa3377",
    "#66ccee",
    "#bbbbbb",
)


@dataclass(frozen=True)
class Stretch:
    """Of one row of a time line; begin and end in seconds."""

    row: str
    begin: float
    end: float


def stacked_bar(shares: Mapping[str, float]) -> str:
    """Shares that add up to one, and what each is of."""
    parts, legend, at = [], [], 0.0
    for number, (name, share) in enumerate(shares.items()):
        color = _color(number)
        parts.append(_rectangle(at * WIDTH, 0, share * WIDTH, 30, color, f"{name}: {share:.1%}"))
        if share > 0.06:
            parts.append(_text(at * WIDTH + 6, 20, f"{share:.0%}", "label"))
        legend.append(f'<span class="key"><i style="background:{color}"></i>{_safe(name)} {share:.1%}</span>')
        at += share
    return _svg(30, parts) + f'<p class="legend">{"".join(legend)}</p>'


def time_line(stretches: Sequence[Stretch], order: Sequence[str] = ()) -> str:
    """A row for each name, in this order; others behind them as they come."""
    rows = list(dict.fromkeys([*order, *(one.row for one in stretches)]))
    first, last = min(one.begin for one in stretches), max(one.end for one in stretches)
    scale = (WIDTH - _LEFT) / ((last - first) or 1.0)
    parts = [_text(0, number * _ROW + 17, name) for number, name in enumerate(rows)]
    for one in stretches:
        number = rows.index(one.row)
        parts.append(
            _rectangle(
                _LEFT + (one.begin - first) * scale,
                number * _ROW + 3,
                max(0.5, (one.end - one.begin) * scale),
                _ROW - 6,
                _color(number),
                f"{one.row}: {_seconds(one.end - one.begin)}",
            )
        )
    height = len(rows) * _ROW
    parts += [
        f'<line x1="{_LEFT}" y1="{height}" x2="{WIDTH}" y2="{height}" class="axis"/>',
        _text(_LEFT, height + 16, "0"),
        _text(WIDTH, height + 16, _seconds(last - first), "right"),
    ]
    return _svg(height + 22, parts)


def memory_lines(samples: Sequence[MemorySample]) -> str:
    """Bytes at the end of each step, from zero on."""
    lines = {"process": [float(one.process) for one in samples]}
    if samples[0].allocated is not None:
        lines = {
            name: [float(getattr(one, name) or 0) for one in samples] for name in ("allocated", "peak", "reserved")
        }
    return _curves(lines, [f"step {number}" for number in range(1, len(samples) + 1)])


def memory_of_stages(stages: Sequence[RunStage]) -> str:
    """The process at the end of each stage of a run."""
    return _curves({"process": [float(one.process) for one in stages]}, [one.name for one in stages])


def _curves(lines: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    height = 150
    highest = max(max(values) for values in lines.values()) or 1.0
    step = (WIDTH - _LEFT - 10) / max(1, len(names) - 1)
    parts = [
        f'<line x1="{_LEFT}" y1="{height}" x2="{WIDTH}" y2="{height}" class="axis"/>',
        _text(0, 14, f"{highest / 2**30:.3g} GiB"),
        _text(0, height, "0"),
    ]
    legend = []
    for number, (name, values) in enumerate(lines.items()):
        color = _color(number)
        points = [(_LEFT + at * step, height - value / highest * (height - 10)) for at, value in enumerate(values)]
        for before, after in pairwise(points):
            parts.append(
                f'<line x1="{before[0]:.1f}" y1="{before[1]:.1f}" x2="{after[0]:.1f}" y2="{after[1]:.1f}" '
                f'stroke="{color}" stroke-width="2"/>'
            )
        for (x, y), value, at in zip(points, values, names, strict=True):
            told = _safe(f"{name}, {at}: {value / 2**30:.3g} GiB")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{told}</title></circle>')
        legend.append(f'<span class="key"><i style="background:{color}"></i>{_safe(name)}</span>')
    parts += [_text(_LEFT, height + 16, names[0]), _text(WIDTH, height + 16, names[-1], "right")]
    return _svg(height + 22, parts) + f'<p class="legend">{"".join(legend)}</p>'


def stretches_of_steps(spans: Sequence[Span]) -> list[Stretch]:
    return [Stretch(one.stage, one.begin, one.end) for one in spans]


def stretches_of_run(stages: Sequence[RunStage]) -> list[Stretch]:
    return sorted((Stretch(one.name, one.begin, one.end) for one in stages), key=lambda one: one.begin)


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _rectangle(x: float, y: float, width: float, height: float, color: str, told: str) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"'
    return f"<rect {shape}><title>{_safe(told)}</title></rect>"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{_safe(text)}</text>'


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _safe(text: str) -> str:
    return html.escape(text)


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]
