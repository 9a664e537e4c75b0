"""Events of a Chrome trace, as torch.profiler writes them. Times are seconds since its first event."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LARGEST = 2**30  # bytes of JSON; as Python objects they are ten times as many


@dataclass(frozen=True)
class Event:
    """Something that took time: `begin` to `end`, on a thread (or a stream of a device)."""

    name: str
    kind: str
    thread: tuple[str, str]
    begin: float
    end: float
    arguments: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def is_in(self, other: Event) -> bool:
        return other.begin <= self.begin and self.end <= other.end


@dataclass(frozen=True)
class ChromeTrace:
    """Events by their beginning; samples: of memory; header: what stands beside the events."""

    events: list[Event]
    samples: list[Mapping[str, Any]]
    header: Mapping[str, Any]


def read_events(path: str | Path) -> ChromeTrace:
    """A trace, compressed or not.

    Raises:
        ValueError: it is none, or too large.
        OSError: there is no such file.
    """
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            text = file.read(_LARGEST + 1)
    except (FileNotFoundError, IsADirectoryError) as error:
        what = " is a folder" if Path(path).is_dir() else ": there is no such file"
        raise type(error)(f"{path}{what}; give a file that torch.profiler's export_chrome_trace wrote.") from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    if len(text) > _LARGEST:
        raise ValueError(
            f"{path} has more than {_LARGEST // 2**30} GiB of JSON: record fewer steps, "
            "torch.profiler.schedule(wait=1, warmup=1, active=5)."
        )
    try:
        found = json.loads(text)
        rows = found["traceEvents"] if isinstance(found, dict) else found
        header = {name: value for name, value in found.items() if name != "traceEvents"} if rows is not found else {}
        timed = [row for row in rows if row.get("ph") == "X" and "dur" in row]
        first = min((row["ts"] for row in timed), default=0)
        events = [_event(row, first) for row in timed]
        samples = [row["args"] for row in rows if row.get("name") == "[memory]"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no trace that torch.profiler's export_chrome_trace wrote: {error!r}.") from error
    # Longer first, so that what is inside of another comes behind it.
    return ChromeTrace(sorted(events, key=lambda one: (one.begin, -one.end)), samples, header)


def _event(row: Mapping[str, Any], first: float) -> Event:
    # Older traces count from 1970: as a double of seconds, that would be off by a third of a microsecond.
    begin = (row["ts"] - first) / 1e6
    thread = str(row.get("pid")), str(row.get("tid"))
    end = begin + float(row["dur"]) / 1e6
    return Event(str(row["name"]), str(row.get("cat", "")), thread, begin, end, row.get("args", {}))


def own_seconds(events: Iterable[Event]) -> list[tuple[Event, float]]:
    """Each event with its seconds, less those of the events inside it on the same thread."""
    own: list[list[Any]] = []
    open_: dict[tuple[str, str], list[int]] = {}
    for number, one in enumerate(events):
        own.append([one, one.seconds])
        stack = open_.setdefault(one.thread, [])
        while stack and own[stack[-1]][0].end <= one.begin:
            stack.pop()
        if stack:
            own[stack[-1]][1] -= one.seconds
        stack.append(number)
    return [(one, seconds) for one, seconds in own]
