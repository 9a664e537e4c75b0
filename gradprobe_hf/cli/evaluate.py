"""Measure the perplexity of a model on a text."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.options import add_placement_arguments
from gradprobe_hf.cli.output import add_model_arguments, placement_of, print_evaluation, print_json, source_of
from gradprobe_hf.data.windows import load_batches
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.loading import load_model, load_processing_class
from gradprobe_hf.probe.engine import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--data", required=True, metavar="SPEC", help="'pydoc', a file or folder, or a Hub dataset")
    parser.add_argument("--num-samples", type=int, default=20, metavar="N", help="windows (default: 20)")
    parser.add_argument("--sequence-length", type=int, default=512, metavar="N", help="tokens a window (default: 512)")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="windows in a pass (default: 4)")
    add_placement_arguments(parser.add_argument_group("memory"))
    parser.add_argument("--quiet", action="store_true", help="no progress bars, errors only")


def run(options: argparse.Namespace) -> None:
    source = source_of(options)
    model = load_model(options.model, **source, **placement_of(options))
    batches = load_batches(
        options.data,
        part="evaluation",
        model=model,
        processing_class=load_processing_class(model, **source),
        samples=options.num_samples,
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        seed=0,
        progress=not options.quiet,
    )
    found = measure(Workload(model, batches, progress=not options.quiet))
    values = {"model": options.model, **found.to_dict(), **batches.describe()}
    print_json(values) if options.json else print_evaluation(values)
