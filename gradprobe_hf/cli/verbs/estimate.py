"""`gradprobe estimate`."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from gradprobe_hf.cli.config_options import add_config_options, configuration, option_values
from gradprobe_hf.cli.options import VerbParser, given

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gradprobe_hf.report.report import Report


def add_arguments(parser: VerbParser) -> None:
    parser.add_model(
        "dtype", "revision", "trust_remote_code", form="a Hub id, a folder with a config.json, or that file"
    )
    parser.add_options("quiet")
    # All placements are shown, checkpointed or not, and what does not change memory, disk space and passes is left out.
    add_config_options(parser, without=("evaluation_samples", "evaluation_protocol", "checkpointing", "save_every"))
    parser.add_option("long runs", "resume", action="store_true", help="count the snapshots of a run with --resume-dir")
    parser.add_option(
        "options",
        "measured",
        metavar="FOLDER",
        help="a checkpoint that was pruned from MODEL: what is estimated of its run, beside what that took",
    )


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.cli.output import print_json
    from gradprobe_hf.cli.tables.estimate import print_estimate, print_expectations
    from gradprobe_hf.data.windows import check_length
    from gradprobe_hf.estimation.estimate import check_estimable, estimate
    from gradprobe_hf.model.loading.checkpoint_class import chosen_class
    from gradprobe_hf.model.loading.dequantized import check_stored_plain
    from gradprobe_hf.model.loading.load import load_config, skeleton
    from gradprobe_hf.model.targets import find_targets
    from gradprobe_hf.report.against_estimate import against_estimate, planned
    from gradprobe_hf.run.request.checks import check_paths
    from gradprobe_hf.run.request.compatibility import check_resumable, check_shapes
    from gradprobe_hf.tasks.table import auto_classes, task_for

    measured = None if options.measured is None else _measured(options)
    config = configuration(options) if measured is None else planned(measured)
    check_estimable(config)
    if options.resume:
        check_resumable(config, "resume=True")
    check_paths(options.model, {})
    loaded = load_config(options.model, **given(options, "revision", "trust_remote_code"))
    check_stored_plain(options.model, loaded)
    cls = chosen_class(loaded, auto_classes(config.task))
    dtype = options.dtype or (None if measured is None else measured.model["dtype"])
    model = skeleton(loaded, cls, dtype=dtype, **given(options, "trust_remote_code"))
    targets = find_targets(model, config.include, config.exclude)
    if measured is not None:
        _check_of(measured, model, sum(target.numel for target in targets), options)
    check_shapes(model, targets, config)
    check_length(model, config.sequence_length or 0)
    task = task_for(config.task, type(model).__name__, loaded.is_encoder_decoder)
    if task is not None and config.metric is not None:
        task.metric(config.metric)
    if task is not None:
        task.check_length(config.sequence_length, model.main_input_name)
    found = estimate(model, targets, config, snapshots=options.resume)
    beside = () if measured is None else against_estimate(measured, found)
    if measured is not None:  # what a run reads by default, and this one may not have
        found = replace(found, written=None, measured=None)
    if options.json:
        taken = {} if measured is None else {"against_measured": [asdict(one) for one in beside]}
        print_json({"model": options.model, **found.to_dict(), **taken})
    else:
        print_estimate(found)
        print_expectations(beside)


def _check_of(measured: Report, model: PreTrainedModel, weights: int, options: argparse.Namespace) -> None:
    """Raise ValueError for the run of another model. Args: weights: of MODEL's targets, with the run's options."""
    own = measured.model["class"], measured.weights + sum(one.weights for one in measured.unreached)
    if own != (type(model).__name__, weights):
        raise ValueError(
            f"--measured {options.measured} was pruned from another model, {measured.model['name']}: {own[0]} with "
            f"{own[1]:,} weights in its matrices, and {options.model} is {type(model).__name__} with {weights:,}."
        )


def _measured(options: argparse.Namespace) -> Report:
    """The report of a run, whose configuration is the one.

    Raises:
        ValueError: an option of a configuration is given besides.
        FileNotFoundError: no run has written that folder.
    """
    from gradprobe_hf.report.report import REPORT_NAME, Report

    if others := sorted(option_values(options)):
        name = others[0].replace("_", "-")
        raise ValueError(f"--{name} has no effect with --measured, which has the options of its run. Leave it out.")
    try:
        found = Report.load(options.measured)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"--measured {options.measured}: there is no {REPORT_NAME} in it, which every checkpoint that "
            "`gradprobe prune` wrote has. Give the folder of one."
        ) from None
    if found.recovery is not None and not found.config.get("recovery_steps"):
        raise ValueError(
            f"--measured {options.measured} was recovered behind its pruning, and seconds and memory of both are in "
            f"its {REPORT_NAME}: give the folder of a run of `gradprobe prune`."
        )
    return found
