"""`gradprobe estimate`."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.config_options import add_config_options, configuration
from gradprobe_hf.cli.options import VerbParser, given


def add_arguments(parser: VerbParser) -> None:
    parser.add_model(
        "dtype", "revision", "trust_remote_code", form="a Hub id, a folder with a config.json, or that file"
    )
    parser.add_options("quiet")
    # All placements are shown, checkpointed or not, and what does not change memory, disk space and passes is left out.
    add_config_options(parser, without=("evaluation_samples", "evaluation_protocol", "checkpointing", "save_every"))
    parser.add_option("long runs", "resume", action="store_true", help="count the snapshots of a run with --resume-dir")


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.cli.estimate_table import print_estimate
    from gradprobe_hf.cli.output import print_json
    from gradprobe_hf.data.windows import check_length
    from gradprobe_hf.estimation.estimate import check_estimable, estimate
    from gradprobe_hf.model.loading import chosen_class, load_config, skeleton
    from gradprobe_hf.model.targets import find_targets
    from gradprobe_hf.run.compatibility import check_resumable, check_shapes
    from gradprobe_hf.run.request_checks import check_paths
    from gradprobe_hf.tasks.table import auto_classes, task_for

    config = configuration(options)
    check_estimable(config)
    if options.resume:
        check_resumable(config, "resume=True")
    check_paths(options.model, {})
    loaded = load_config(options.model, **given(options, "revision", "trust_remote_code"))
    model = skeleton(loaded, chosen_class(loaded, auto_classes(config.task)), dtype=options.dtype)
    targets = find_targets(model, config.include, config.exclude)
    check_shapes(model, targets, config)
    check_length(model, config.sequence_length or 0)
    task = task_for(config.task, type(model).__name__, loaded.is_encoder_decoder)
    if task is not None and config.metric is not None:
        task.metric(config.metric)
    found = estimate(model, targets, config, snapshots=options.resume)
    print_json({"model": options.model, **found.to_dict()}) if options.json else print_estimate(found)
