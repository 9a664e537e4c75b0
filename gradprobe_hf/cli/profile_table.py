"""The tables of `gradprobe profile`."""

from __future__ import annotations

from rich import box
from rich.table import Table

from gradprobe_hf.cli.output import console
from gradprobe_hf.profiling.report import ProfileReport


def print_profile(report: ProfileReport) -> None:
    out = console()
    for line in report.summary():
        out.print(line)
    for title, header, rows in report.tables():
        if title == "Findings":
            for share, kind, line, evidence, remedy in rows:
                out.print(f"\n{share} {kind}  {line}", style="bold")
                out.print(f"  {evidence}")
                out.print(f"  -> {remedy}")
            out.print()
            continue
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in header:
            table.add_column(name, overflow="fold")  # half of a module's name tells nothing
        for row in rows:
            table.add_row(*row)
        out.print(table)
