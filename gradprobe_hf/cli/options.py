"""Arguments that several verbs take, and the configuration they make."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, get_args

from gradprobe_hf.cli.output import given
from gradprobe_hf.config import (
    METHOD,
    PROBES,
    AccumulatorDevice,
    AccumulatorDtype,
    BlockOrder,
    GradProbeConfig,
    Order,
    Preset,
)
from gradprobe_hf.decisions.table import RULES
from gradprobe_hf.runtime.yaml_options import read_yaml
from gradprobe_hf.scores.budget import Scope
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES
from gradprobe_hf.scores.table import SCORES
from gradprobe_hf.updates.table import UPDATES

# Options of the command that are fields of the configuration; a default of None means: what the configuration says.
CONFIG_FIELDS = tuple(field.name for field in fields(GradProbeConfig))
PRESET_FIELDS = ("preset", *METHOD, "dense_target")


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how to prune")
    how.add_argument("--sparsity", type=float, help="fraction of the weights to remove, in [0, 1) (default: 0.5)")
    how.add_argument(
        "--preset",
        choices=get_args(Preset),
        help="one probe, two, or one and --update admm (default: balanced); for n:m SparseGPT, SparseGPT and "
        "admm, or one probe and admm (default: best)",
    )
    how.add_argument("--pattern", help="'unstructured' (default) or n:m; 2:4 keeps 2 of every 4 inputs")
    how.add_argument("--score", choices=tuple(SCORES), help="how weights are ordered (default: fisher)")
    how.add_argument(
        "--probes", type=int, choices=PROBES, help="gradient measurements (default: 2 with fisher, else 0)"
    )
    how.add_argument("--rule", choices=RULES, help="how two probes decide (default: budget)")
    how.add_argument(
        "--scope", choices=get_args(Scope), help="over what one budget is spent (default: global, or the strategy's)"
    )
    how.add_argument(
        "--fisher", choices=tuple(FISHER_ESTIMATES), help="estimate of the squared gradient (default: blend)"
    )
    how.add_argument(
        "--gradient-threshold",
        type=_threshold,
        metavar="X",
        help="growth tolerated by --rule threshold: a number, 'adaptive', or a JSON object from patterns (default: 0.0)",
    )
    how.add_argument("--min-matrix-sparsity", type=float, metavar="X", help="the least that goes of any matrix")
    how.add_argument("--max-matrix-sparsity", type=float, metavar="X", help="the most that goes of any matrix")
    how.add_argument("--order", choices=get_args(Order), help="all blocks together, or step by step (default: joint)")
    how.add_argument("--block-order", choices=get_args(BlockOrder), help="of --order sequential (default: forward)")
    how.add_argument("--blocks-per-step", type=int, metavar="N", help="of --order sequential (default: 1)")
    how.add_argument(
        "--rounds", type=_fractions, metavar="A,B,...", help="probe again at each of these sparsities: 0.2,0.35,0.5"
    )
    how.add_argument(
        "--max-metric-drop",
        type=_drop,
        metavar="X",
        help="prune until perplexity has risen by this much, absolute or like 5%% (at most to --sparsity)",
    )
    how.add_argument("--initial-sparsity", type=float, metavar="X", help="of --max-metric-drop's first trial")
    how.add_argument("--sparsity-step", type=float, metavar="X", help="between its trials (default: 0.1)")
    how.add_argument("--reduction-factor", type=float, metavar="X", help="what shrinks the candidates (default: 0.1)")
    how.add_argument(
        "--spike-limit",
        type=float,
        metavar="X",
        help="how much a sequence's gradient energy may grow between the probes (default: 2; 0: as it will)",
    )
    how.add_argument(
        "--update",
        choices=tuple(UPDATES),
        help="change the kept weights to keep each matrix's outputs; sparsegpt chooses the mask too (default: none, for "
        "n:m admm)",
    )
    how.add_argument(
        "--dense-target",
        type=float,
        metavar="X",
        help="how far an update goes towards the dense model's outputs, 0 to 1 (default: 0.25; obs: 0.5; "
        "sparsegpt alone: 0)",
    )
    how.add_argument("--damping", type=float, metavar="X", help="of reconstruction's Hessians (default: 0.01)")
    how.add_argument("--include", action="append", metavar="PATTERN", help="prune only what matches (repeatable)")
    how.add_argument("--exclude", action="append", metavar="PATTERN", help="leave alone what matches (repeatable)")
    how.add_argument("--seed", type=int, help="draws calibration windows, random scores, 'self' (default: 0)")
    how.add_argument("--config", metavar="FILE.yaml", help="options from a file; those given here win over it")


def add_data_arguments(parser: argparse.ArgumentParser, no_evaluation: str = "") -> argparse._ActionsContainer:
    """The texts, and how much of them. Args: no_evaluation: how a verb that can do without says so."""
    data = parser.add_argument_group("data: 'pydoc', 'self', a file or folder, or a Hub dataset id[:config[:split]]")
    data.add_argument("--calibration", default="pydoc", metavar="SPEC", help="text for the probes (default: pydoc)")
    add_window_arguments(data)
    data.add_argument(
        "--evaluation",
        metavar="SPEC",
        help=f"text to measure on{no_evaluation} (default: the held-out part of pydoc if that is --calibration)",
    )
    data.add_argument("--evaluation-samples", type=int, metavar="N", help="evaluation windows (default: 20)")
    return data


def add_window_arguments(group: argparse._ActionsContainer) -> None:
    """The calibration windows: how many, how long, how many at a time."""
    group.add_argument("--num-samples", type=int, metavar="N", help="calibration windows (default: 128)")
    group.add_argument("--sequence-length", type=int, metavar="N", help="tokens in a window (default: 512)")
    group.add_argument(
        "--batch-size", type=_whole_or_auto, metavar="N", help="windows in a pass, or 'auto' (default: 4)"
    )


def add_accumulator_arguments(memory: argparse._ActionsContainer) -> None:
    memory.add_argument(
        "--accumulator-dtype",
        choices=get_args(AccumulatorDtype),
        help="what statistics are kept in: 4, 2 or about 1 byte per weight (default: float32)",
    )
    memory.add_argument(
        "--accumulator-device",
        choices=get_args(AccumulatorDevice),
        help="where: with the weights ('same'), in the host's memory, or in files (default: same)",
    )


def add_placement_arguments(memory: argparse._ActionsContainer) -> None:
    """Where the weights are, as `from_pretrained` takes it."""
    memory.add_argument(
        "--device-map",
        type=_device_map,
        metavar="MAP",
        help="'auto', 'disk', 'cpu', a device, or a JSON object from modules to them (default: in memory)",
    )
    memory.add_argument(
        "--max-memory", type=_json_object, metavar="JSON", help='what "auto" may use: {"0": "20GiB", "cpu": "8GiB"}'
    )
    memory.add_argument("--offload-folder", metavar="DIR", help="for what has to be written to disk")


def add_memory_arguments(memory: argparse._ActionsContainer) -> None:
    """Where weights and statistics are, and what is recomputed: memory and time, not the result."""
    add_placement_arguments(memory)
    memory.add_argument(
        "--checkpointing",
        type=_on_off_auto,
        metavar="on|off|auto",
        help="recompute blocks in backward (default: auto, from free memory)",
    )
    add_accumulator_arguments(memory)


def add_resume_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--resume-dir", metavar="DIR", help="save the state of the probes here, and go on from it")
    parser.add_argument("--save-every", type=int, metavar="N", help="batches between two states (default: 16)")


def _threshold(text: str) -> Any:
    if text == "adaptive":
        return text
    with _expected("a number, 'adaptive', or a JSON object from patterns to numbers", text):
        return _json_object(text) if text.startswith("{") else float(text)


def _fractions(text: str) -> tuple[float, ...]:
    with _expected("a list of fractions, like 0.2,0.35,0.5", text):
        return tuple(map(float, text.split(",")))


def _drop(text: str) -> float | str:
    with _expected("a number, or a share like 5%", text):
        return text if text.endswith("%") else float(text)


def _whole_or_auto(text: str) -> int | str:
    with _expected("a whole number or 'auto'", text):
        return text if text == "auto" else int(text)


@contextmanager
def _expected(wanted: str, text: str) -> Iterator[None]:
    """argparse would name the function that failed."""
    try:
        yield
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from error


def _on_off_auto(text: str) -> bool | str:
    choices: dict[str, bool | str] = {"on": True, "off": False, "auto": "auto"}
    if text not in choices:
        raise argparse.ArgumentTypeError(f"{text!r} is not 'on', 'off' or 'auto'")
    return choices[text]


def _device_map(text: str) -> Any:
    return _json_object(text) if text.startswith("{") else text


def _json_object(text: str) -> dict[Any, Any]:
    try:
        values = json.loads(text)
        return {int(name) if name.isdigit() else name: value for name, value in values.items()}
    except (ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: {error}") from error


def configuration(options: argparse.Namespace) -> GradProbeConfig:
    return GradProbeConfig.from_dict(option_values(options))


def option_values(options: argparse.Namespace) -> dict[str, Any]:
    """The file's options, with those of the command line over them."""
    values: dict[str, Any] = read_yaml(options.config) if options.config else {}
    if getattr(options, "preset", None) is not None:  # wins over what an earlier one came to in the file
        values = {name: value for name, value in values.items() if name not in PRESET_FIELDS}
    return values | given(options, *CONFIG_FIELDS)
