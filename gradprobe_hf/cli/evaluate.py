"""`gradprobe evaluate`."""

from __future__ import annotations

import argparse
from dataclasses import fields

from gradprobe_hf.cli.config_options import add_fields
from gradprobe_hf.cli.options import PLACEMENT, SOURCE, VerbParser, given
from gradprobe_hf.data.text_options import TextOptions

TEXT_OPTIONS = tuple(field.name for field in fields(TextOptions))


def add_arguments(parser: VerbParser) -> None:
    parser.add_model(*SOURCE)
    parser.add_options(*PLACEMENT, "quiet")
    parser.add_option("data", "data", required=True, metavar="SPEC", help="text to measure perplexity on")
    numbers = {
        "num_samples": (20, "windows"),
        "sequence_length": (512, "tokens in a window"),
        "batch_size": (4, "windows in one forward pass"),
    }
    for name, (default, what) in numbers.items():
        parser.add_option("data", name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    add_fields(parser, TEXT_OPTIONS)


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.cli.output import print_evaluation, print_json
    from gradprobe_hf.data.windows import WindowSpec, load_batches
    from gradprobe_hf.evaluation.perplexity import measure
    from gradprobe_hf.model.loading import load, load_processing_class
    from gradprobe_hf.probe.engine import Workload

    loaded = load(options.model, **given(options, *SOURCE, *PLACEMENT))
    model = loaded.model
    batches = load_batches(
        options.data,
        WindowSpec(
            options.num_samples,
            options.sequence_length,
            options.batch_size,
            text=TextOptions(**given(options, *TEXT_OPTIONS)),
        ),
        part="evaluation",
        model=model,
        processing_class=load_processing_class(model, loaded.processing_name, **given(options, *SOURCE)),
        progress=not options.quiet,
    )
    found = measure(Workload(model, batches, progress=not options.quiet))
    values = {"model": options.model, **found.to_dict(), **batches.describe()}
    print_json(values) if options.json else print_evaluation(values)
