"""The table of `gradprobe estimate`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradprobe_hf.cli.output import console, table_of
from gradprobe_hf.estimation.estimate import Estimate
from gradprobe_hf.estimation.footprint import DEVICES, Device, Placement, Stage
from gradprobe_hf.report.against_estimate import Expectation, rows_of


def print_estimate(found: Estimate) -> None:
    """One column per placement. The items of a device are those of one stage; its highest may be that of another."""
    out = console()
    experts = f", {found.active_target_weights:,} of them active for a token," if _has_experts(found) else ""
    out.print(f"{found.architecture}, {found.parameters:,} parameters in {found.dtype}, on {found.device}")
    out.print(
        f"targets: {found.target_weights:,} weights{experts} in {found.matrices:,} matrices of {found.blocks} blocks"
    )
    out.print(_calibration(found))
    _print_texts(out, found)
    table = table_of("", *(one.name for one in found.placements))
    for device in (device for device in DEVICES if device in found.placements[0].room):
        _add_device(table, found.placements, device)
    _add_work(table, found)
    out.print(table)
    if any(found.work[one.name].bytes_read for one in found.placements):
        out.print("offloaded: weights stay on disk; the embedding or output head and one block of them are in memory")
    fitting = [one.name for one in found.placements if one.fits]
    out.print(f"fits here: {', '.join(fitting) or 'none of them'}", style="bold")
    for note in found.notes:
        out.print(f"- {note}")


def print_expectations(found: Sequence[Expectation]) -> None:
    """What was estimated of a run, and what it took; nothing of none."""
    if not found:
        return
    table = table_of("", "estimated", "measured")
    for row in rows_of(found):
        table.add_row(*row)
    console().print(table)


def _calibration(found: Estimate) -> str:
    if not found.batches:
        return "no pass over calibration data"
    if not found.reads_text:
        return f"calibration: {found.batches} batches of {found.rows} images, or recordings"
    tokens = found.batches * found.rows * found.length
    return f"calibration: {found.batches} batches of {found.rows} x {found.length} tokens, {tokens:,} in all"


def _print_texts(out: Console, found: Estimate) -> None:
    """What a run does by default beside its walks over the calibration text."""
    if (text := found.written) is not None:
        out.print(
            f"that text, where the model writes it (the default): {text.passes:,} passes, each of one token of "
            f"{text.at_once} windows, {_scaled(text.flops, 'FLOP')}"
        )
    if (measured := found.measured) is not None:
        out.print(
            f"evaluation, dense and pruned (by default): {measured.windows} windows, {measured.passes} passes of "
            f"{measured.rows}, {_scaled(measured.flops, 'FLOP')}"
        )
    if (recovery := found.recovery) is not None:
        out.print(
            f"recovery: {recovery.steps} steps of {recovery.rows}{f' x {recovery.length} tokens' * found.reads_text}, "
            f"with the dense model beside, {_scaled(recovery.flops, 'FLOP')}"
        )


def _has_experts(found: Estimate) -> bool:
    return found.active_target_weights != found.target_weights


def _add_device(table: Table, placements: Sequence[Placement], device: Device) -> None:
    """The items of one stage, the same for all columns, and how high memory gets in any of them."""
    stages = [_shown(one, device) for one in placements]
    where = "written to disk" if device == "disk" else f"memory of the {device}"
    table.add_row(Text(f"{where} ({_size(placements[0].room[device])} free)", style="bold"))
    shown = _add_items(table, stages, device)
    total = "in all" if device == "disk" else "at its highest"
    table.add_row(_indented(total, style="bold"), *(_total(one, device) for one in placements))
    highest = [one.peak_stage(device) for one in placements]
    if any(peak.bytes_on(device) > stage.bytes_on(device) for peak, stage in zip(highest, stages, strict=True)):
        table.add_row(_indented("reached in stage"), *(peak.name for peak in highest))
        if {peak.name for peak in highest} == {"recover"}:  # the one stage that has more of its own than the model
            _add_items(table, highest, device, besides=shown, indent=4)
    table.add_section()


def _add_items(
    table: Table, stages: Sequence[Stage], device: Device, besides: Collection[str] = (), indent: int = 2
) -> list[str]:
    """What a stage holds, by placement. Returns the items' labels, of which those of `besides` are left out."""
    labels = dict.fromkeys(item.label for stage in stages for item in stage.items if item.device == device)
    for label in labels:
        sizes = [_labelled(stage, device, label) for stage in stages]
        if any(sizes) and label not in besides:
            table.add_row(_indented(label, indent=indent), *(_size(size) if size else "-" for size in sizes))
    return list(labels)


def _shown(placement: Placement, device: Device) -> Stage:
    """The probe, where there is one: what it holds is what can be chosen. Otherwise the fullest stage."""
    probe = next(stage for stage in placement.stages if stage.name == "probe")
    probes = any(item.label == "activations" and item.bytes for item in probe.items)
    return probe if probes and device != "disk" else placement.peak_stage(device)


def _total(placement: Placement, device: Device) -> Text:
    fits = placement.needed(device) <= placement.room[device]
    return Text(_size(placement.peak(device)), style="bold" if fits else "bold red")


def _labelled(stage: Stage, device: Device, label: str) -> int:
    return sum(item.bytes for item in stage.items if item.device == device and item.label == label)


def _add_work(table: Table, found: Estimate) -> None:
    works = [found.work[one.name] for one in found.placements]
    table.add_row(Text("work", style="bold"))
    passes = (f"{work.forwards:g} + {work.backwards:g}" for work in works)
    table.add_row(_indented("forward + backward passes"), *passes)
    table.add_row(_indented("floating-point operations"), *(_scaled(work.flops, "FLOP") for work in works))
    if any(work.bytes_read for work in works):
        read = (_size(work.bytes_read) if work.bytes_read else "-" for work in works)
        table.add_row(_indented("weights read from disk"), *read)


def _indented(label: str, style: str = "", indent: int = 2) -> Padding:
    """All its lines, where it has to be broken."""
    return Padding(Text(label, style=style), (0, 0, 0, indent))


def _size(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count < 1e9 else _scaled(count, "B")


def _scaled(number: float, unit: str) -> str:
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= size:
            return f"{number / size:,.2f} {prefix}{unit}"
    return f"{number:,.0f} {unit}"
