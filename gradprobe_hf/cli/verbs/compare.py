"""`gradprobe compare`. Its help names the rows there are, so that all is imported at once."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path

from gradprobe_hf.checkpoint.write import check_writable
from gradprobe_hf.cli.config_options import add_config_options, configuration, option_values
from gradprobe_hf.cli.options import PLACEMENT, SOURCE, VerbParser, given, shows_progress
from gradprobe_hf.cli.output import console, print_comparison, print_json
from gradprobe_hf.cli.recipe import RecipeError
from gradprobe_hf.comparison.baselines import (
    AS_CONFIGURED,
    BASELINES,
    BASELINES_OF_THE_WHOLE,
    BASELINES_OF_UNITS,
    rows_of,
)
from gradprobe_hf.comparison.compare import RESULT_NAME, Compared, compare_pretrained
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.files.offload_store import existing_parent
from gradprobe_hf.runtime.option_checks import check_folder
from gradprobe_hf.runtime.paths import expanded
from gradprobe_hf.runtime.processes import join_processes
from gradprobe_hf.runtime.yaml_options import read_yaml

logger = logging.getLogger(__name__)


def add_arguments(parser: VerbParser) -> None:
    parser.add_model(*SOURCE)
    parser.add_options("output", help=f"folder for {RESULT_NAME} and the figure")
    parser.add_options("overwrite", "calibration", "evaluation", *PLACEMENT, "quiet")
    rows = (
        f"rows to make: {', '.join(BASELINES)}; with --structure {', '.join(BASELINES_OF_UNITS)}, or of blocks and "
        f"experts alone {', '.join(BASELINES_OF_THE_WHOLE)}; {AS_CONFIGURED}, where the options are none of these "
        "(default: all)"
    )
    parser.add_option("options", "methods", metavar="NAME,...", help=rows)
    also = "a row for this file of options, over those given here; named after the file (repeatable)"
    parser.add_option("options", "also", action="append", metavar="FILE.yaml", help=also)
    add_config_options(parser, without=("save_every", "recovery_steps", "recovery_learning_rate"))


def run(options: argparse.Namespace) -> None:
    config = configuration(options)
    if options.overwrite and not options.output:
        raise ValueError("overwrite=True has no effect here: it belongs to output_dir. Set that, or leave it out.")
    if options.output:
        options.output = expanded(options.output)
        join_processes().on_main(partial(_check_output, options.output, options.overwrite))
    found = compare_pretrained(
        options.model,
        config,
        _chosen(config, options),
        calibration=options.calibration,
        evaluation=options.evaluation,
        on_row=partial(_note, options) if join_processes().is_main else None,
        progress=shows_progress(options),
        **given(options, *SOURCE, *PLACEMENT),
    )
    if not join_processes().is_main:
        return
    if options.output and found.speed:
        found.save(options.output)
    if options.json:
        print_json(found.to_dict())
    else:
        print_comparison(found.rows, found.dense, found.evaluation, found.speed, found.original)
        if options.output:
            console().print(f"{options.output}/{RESULT_NAME}, figures {options.output}/*.png")


def _check_output(output: str, overwrite: bool) -> None:
    """Raise OSError, before a model is loaded, where the result cannot be written."""
    folder = Path(output)
    if folder.is_file():
        raise FileExistsError(f"--output {output} is a file; choose a folder.")
    check_folder("output_dir", output)
    if (folder / RESULT_NAME).exists() and not overwrite:
        raise FileExistsError(f"{output}/{RESULT_NAME} exists; --overwrite replaces it.")
    check_writable(existing_parent(folder.resolve()), output)


def _note(options: argparse.Namespace, found: Compared) -> None:
    """What is there is saved with every row: the next one may take an hour, or fail."""
    if options.output:
        found.save(options.output)
    row = found.rows[-1]
    shown = f"loss {row.loss:,.4f}" if row.perplexity is None else f"perplexity {row.perplexity:,.4f}"
    logger.info("%s: %s at %.4f%%, %.0f s", row.method, shown, 100 * row.sparsity, row.seconds)


def _chosen(config: GradProbeConfig, options: argparse.Namespace) -> dict[str, GradProbeConfig]:
    """The configurations that were asked for by name, by options and by file; by default every baseline."""
    known = rows_of(config)
    names = list(known) if options.methods is None else [name.strip() for name in options.methods.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"--methods: no method is called {name!r}; there are: {', '.join(known)}.")
        if names.count(name) > 1:
            raise ValueError(f"--methods names {name!r} twice.")
    found = {name: known[name] for name in names}
    for path in options.also or ():
        if Path(path).stem in found:
            raise ValueError(f"--also {path}: a row is called {Path(path).stem!r} already; rename the file.")
        found[Path(path).stem] = _of_file(options, path)
    return found


def _of_file(options: argparse.Namespace, path: str) -> GradProbeConfig:
    try:
        return GradProbeConfig.from_dict(option_values(options) | read_yaml(path))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--also: {error}") from error
    except ValueError as error:
        raise RecipeError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
