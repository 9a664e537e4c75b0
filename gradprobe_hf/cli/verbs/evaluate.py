"""`gradprobe evaluate`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gradprobe_hf.cli.config_options import add_fields
from gradprobe_hf.cli.options import PLACEMENT, SOURCE, VerbParser, given, shows_progress
from gradprobe_hf.cli.values import at_least, names
from gradprobe_hf.data.text.text_options import TEXT_OPTIONS, TextOptions

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from gradprobe_hf.data.batches import Batches
    from gradprobe_hf.model.loading.load import Loaded
    from gradprobe_hf.report.original import Original
    from gradprobe_hf.report.report import Report
    from gradprobe_hf.tasks.table import Task

logger = logging.getLogger(__name__)

TASK_OPTIONS = ("task", "label_column", "metric")
PAPER_OPTIONS = ("text_column", "add_special_tokens")  # those that a text of consecutive windows has a use for
SAMPLES, LENGTH, BATCH = 20, 512, 4
PAPER_BATCH = 1  # its windows are four times as long


def _measures_text(options: argparse.Namespace) -> bool:
    return bool(options.data) or options.protocol == "paper"


# Options of one kind of measurement -> what they belong to, and whether that is asked for.
_BELONGS: dict[str, tuple[str, Callable[[argparse.Namespace], bool]]] = {
    **{
        name: ("--data with --protocol windows", lambda o: bool(o.data) and o.protocol == "windows")
        for name in ("num_samples", *TASK_OPTIONS, *TEXT_OPTIONS)
    },
    **dict.fromkeys(("sequence_length", *PAPER_OPTIONS), ("--data or --protocol paper", _measures_text)),
    **{name: ("--tasks", lambda o: bool(o.tasks)) for name in ("include_path", "num_fewshot", "limit")},
}

# How a text may have helped to make a model.
_KNOWN_BY = {
    "calibrated": "what the model was calibrated on",
    "chosen": "what its sparsity was chosen by (max_metric_drop)",
    "trained": "what the model was trained on",
}


def add_arguments(parser: VerbParser) -> None:
    parser.add_model(*SOURCE)
    parser.add_options(*PLACEMENT, "quiet")
    against = "the dense model (or adapter), loaded beside MODEL and measured too: how far their predictions are apart"
    parser.add_option("options", "against", metavar="DENSE", help=against)
    card = "add what was measured to the metadata of the card in MODEL, a checkpoint folder"
    parser.add_option("options", "write_card", action="store_true", help=card)
    parser.add_option("data", "data", metavar="SPEC", help="text to measure perplexity on, or labelled rows")
    protocol = (
        "'windows' drawn from the text, or 'paper': WikiText-2's raw test split (or --data) whole, in consecutive "
        "windows of the model's context, as GPTQ, SparseGPT and Wanda measure (default: windows)"
    )
    parser.add_option("data", "protocol", choices=("windows", "paper"), default="windows", help=protocol)
    numbers = {
        "num_samples": (1, f"windows, or rows (default: {SAMPLES} windows, 1,000 rows at most)"),
        "sequence_length": (2, f"tokens in a window (default: {LENGTH}; of the paper's the context, at most 2048)"),
        "batch_size": (1, f"windows in one forward pass (default: {BATCH}, of the paper's {PAPER_BATCH})"),
    }
    for name, (least, what) in numbers.items():
        parser.add_option("data", name, type=at_least(least), metavar="N", help=what)
    add_fields(parser, (*TASK_OPTIONS, *TEXT_OPTIONS))
    tasks = "tasks of lm-evaluation-harness, arc_easy,hellaswag say (needs pip install lm-eval)"
    parser.add_option("tasks", "tasks", type=names, metavar="NAME,...", help=tasks)
    parser.add_option("tasks", "include_path", metavar="DIR", help="folder with YAML files of further tasks")
    shots = "examples before each question (default: as the task says)"
    parser.add_option("tasks", "num_fewshot", type=at_least(0), metavar="N", help=shots)
    parser.add_option("tasks", "limit", type=at_least(1), metavar="N", help="the first N questions of each task alone")


@dataclass(frozen=True)
class _Loaded:
    """A model that is measured. Attributes: `name`, as the user gave it."""

    name: str
    loaded: Loaded
    tokenizer: Any

    @classmethod
    def from_name(cls, name: str, task: str | None, **kwargs: Any) -> _Loaded:
        from gradprobe_hf.model.loading.load import load
        from gradprobe_hf.model.loading.placement import to_accelerator
        from gradprobe_hf.model.loading.processing import load_processing_class
        from gradprobe_hf.tasks.table import auto_classes

        loaded = load(name, auto_classes=auto_classes(task), **kwargs)
        to_accelerator(loaded.model, kwargs)
        tokenizer = load_processing_class(loaded.model, loaded.processing_name, **loaded.processing_kwargs)
        return cls(name, loaded, tokenizer)

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def other_dtype(self) -> str | None:
        """The type that it computes in, if that is another one than its weights are stored in."""
        return str(self.model.dtype).removeprefix("torch.") if self.loaded.converted_from else None


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.checkpoint.card_results import check_card
    from gradprobe_hf.checkpoint.origin import stored_report
    from gradprobe_hf.cli.output import print_evaluation, print_json
    from gradprobe_hf.evaluation.harness import TaskRequest, check_tasks, evaluate_tasks
    from gradprobe_hf.model.passes.upcast import upcast_products
    from gradprobe_hf.report.eval_results import task_results, text_results
    from gradprobe_hf.run.request.checks import check_paths
    from gradprobe_hf.runtime.processes import join_processes
    from gradprobe_hf.tasks.table import task_of_class

    _check(options)
    check_paths(options.model, {"data": options.data}, against=options.against)
    if options.write_card:
        check_card(options.model)
    how = given(options, "include_path", "num_fewshot", "limit", "batch_size")
    asked = TaskRequest(options.tasks, progress=shows_progress(options), **how) if options.tasks else None
    manager = check_tasks(asked) if asked else None
    models = {"pruned": _Loaded.from_name(options.model, options.task, **given(options, *SOURCE, *PLACEMENT))}
    is_another = False
    if options.against:
        # A revision or a GGUF file is one of MODEL; adapters are folded in unasked, for nothing is pruned here.
        kwargs = {"merge_adapters": None, **given(options, "dtype", "trust_remote_code", *PLACEMENT)}
        # Of T5, say, the whole is stored, and the encoder alone pruned.
        own = task_of_class(type(models["pruned"].model).__name__, models["pruned"].model.config.is_encoder_decoder)
        task = options.task or (own.name if own is not None and own.embeds else None)
        models["dense"] = _Loaded.from_name(options.against, task, **kwargs)
        report, _ = stored_report(options.model, given(options, "revision"))
        is_another = _is_doubted(options, report, models["dense"])
    values: dict[str, Any] = {"model": options.model, **given(options, "against")}
    beside = _beside(models.get("dense"), is_another)
    results = []
    with ExitStack() as upcast:
        for one in models.values():
            upcast.enter_context(upcast_products(one.model))
        if _measures_text(options):
            values |= _on_text(options, models["pruned"], models.get("dense"))
            results += text_results(
                values, values["task"] or "text-generation", values, beside.name, models["pruned"].other_dtype
            )
        if asked:
            scores = {name: evaluate_tasks(one.model, one.tokenizer, asked, manager) for name, one in models.items()}
            values["tasks"] = {name: [score.to_dict() for score in found] for name, found in scores.items()}
            results += task_results(scores["pruned"], options.limit)
    if not join_processes().is_main:  # each has measured all of it
        return
    # First, so that a card that cannot be written does not cost what was measured.
    print_json(values) if options.json else print_evaluation(values, beside)
    if options.write_card:
        _add_to_card(options, results)


def _add_to_card(options: argparse.Namespace, results: Sequence[EvalResult]) -> None:
    from gradprobe_hf.checkpoint.card_results import add_results
    from gradprobe_hf.cli.output import console

    if results:
        add_results(options.model, results)
        if not options.json:
            console().print(f"added to the model card {options.model}/README.md", soft_wrap=True)
    else:
        logger.warning(
            "nothing was added to the card: a loss by itself is no result that the Hub shows, give a --metric"
        )


def _is_doubted(options: argparse.Namespace, report: Report | None, dense: _Loaded) -> bool:
    """Say what speaks against a model as what MODEL was pruned from; whether it is called otherwise.

    Args:
        report: MODEL's.
    """
    from gradprobe_hf.checkpoint.origin import another_than, check_made_of

    for doubt in check_made_of(report, dense.loaded, f"against={options.against!r} (--against)"):
        logger.warning(doubt)
    if (made_of := another_than(report, dense.loaded)) is None:
        return False
    logger.warning(
        "%s was pruned from %r, and --against is %r: unless these are one model, the distance to it is not what "
        "pruning has cost",
        options.model,
        made_of,
        options.against,
    )
    return True


def _beside(dense: _Loaded | None, is_another: bool) -> Original:
    """What the dense model is called: one that is pruned itself, or need not be what MODEL is of, by its name."""
    from gradprobe_hf.report.build import published_name
    from gradprobe_hf.report.original import DENSE, Original, original_of

    if dense is None or (original_of(dense.loaded.origin) == DENSE and not is_another):
        return DENSE
    name = published_name(dense.model)
    return Original(name, name, f"{name}'s")


def _warn_of_known_text(options: argparse.Namespace, batches: Batches) -> dict[str, float]:
    """Warn where the text that is measured helped to make MODEL; how it did -> about which share of it."""
    from gradprobe_hf.checkpoint.origin import stored_report
    from gradprobe_hf.data.batches import SHARED, share_in_sketch

    report = None
    with suppress(OSError):  # of a Hub model that is in the cache alone
        report, _ = stored_report(options.model, given(options, "revision"))
    recovery = (report and report.recovery) or {}
    texts = {
        "calibrated": report and report.calibration,
        "chosen": report and report.selection,
        "trained": recovery.get("text"),
    }
    shares = {
        what: share_in_sketch(text["sketch"], batches) for what, text in texts.items() if text and "sketch" in text
    }
    known = {what: share for what, share in shares.items() if share >= SHARED}
    for what, share in known.items():
        logger.warning(
            "about %.0f%% of %s is %s, and shows too little of what it lost: measure on others",
            100 * share,
            options.data or batches.source,
            _KNOWN_BY[what],
        )
    return known


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError where there is nothing to measure, and for options without effect."""
    if not _measures_text(options) and not options.tasks:
        raise ValueError("there is nothing to measure: give a text (--data), --protocol paper, or tasks (--tasks).")
    for name, (belongs_to, has_effect) in _BELONGS.items():
        if getattr(options, name) is not None and not has_effect(options):
            raise ValueError(f"--{name.replace('_', '-')} has no effect here: it belongs to {belongs_to}.")


def _on_text(options: argparse.Namespace, pruned: _Loaded, dense: _Loaded | None) -> dict[str, Any]:
    """The loss on a text, and how far the predictions are from a dense model's."""
    from gradprobe_hf.data.batch_checks import check_batches
    from gradprobe_hf.data.labelled import media_in_dtype
    from gradprobe_hf.evaluation.divergence import check_one_vocabulary, measure_pair
    from gradprobe_hf.evaluation.perplexity import measure
    from gradprobe_hf.evaluation.task_metric import measure_metric, metric_of
    from gradprobe_hf.model.passes.loss import is_in_nats
    from gradprobe_hf.probe.engine import Workload
    from gradprobe_hf.tasks.columns import check_one_numbering

    if dense is not None:
        check_one_vocabulary(pruned.tokenizer, dense.tokenizer, (pruned.name, dense.name))
    task = _task_of(options, pruned)
    if dense is not None and (other := _task_of(options, dense)) != task:
        kinds = [one.name if one else "a loss of its own" for one in (task, other)]
        raise ValueError(
            f"{pruned.name} is for {kinds[0]}, and {dense.name} for {kinds[1]}: name the dense model that it was "
            "pruned from (--against), or what both are for (--task)."
        )
    if dense is not None and task is not None and task.labels:
        check_one_numbering(pruned.model.config, dense.model.config, (pruned.name, dense.name))
    labelled_by = pruned
    if task is not None and task.embeds:  # the dense model's embeddings are the labels
        if dense is None:
            raise ValueError(
                f"{pruned.name} makes embeddings, and what is measured of them is how far they have moved: "
                "name the dense model with --against."
            )
        labelled_by = dense
    batches = _batches(options, labelled_by, task)
    if dense is not None:  # it may have fewer positions
        check_batches(dense.model, batches, "data", needs_loss=labelled_by is pruned)
    known = _warn_of_known_text(options, batches)
    metric = metric_of(task, options.metric, batches, pruned.tokenizer, pruned.model.config)
    models = {"pruned": pruned.model} | ({"dense": dense.model} if dense is not None else {})
    works = {
        name: Workload(model, media_in_dtype(batches, model.dtype), progress=shows_progress(options))
        for name, model in models.items()
    }
    values: dict[str, Any] = {"task": task.name if task else None, "metric": None, **batches.describe()}
    values["loss_in_nats"] = is_in_nats(pruned.model)
    values |= {"known_text": known} if known else {}
    if metric is not None:
        scores = {name: measure_metric(work, metric, name) for name, work in works.items()}
        values["metric"] = {"name": metric.name, "title": metric.metric.title, **scores}
    if dense is None:
        return {**measure(works["pruned"]).to_dict(), **values}
    found = measure_pair(works["dense"], works["pruned"]).to_dict()
    return {**found["pruned"], "dense": found["dense"], "divergence": found["divergence"], **values}


def _task_of(options: argparse.Namespace, loaded: _Loaded) -> Task | None:
    from gradprobe_hf.tasks.table import task_for

    return task_for(options.task, type(loaded.model).__name__, loaded.model.config.is_encoder_decoder)


def _batches(options: argparse.Namespace, measured: _Loaded, task: Task | None) -> Batches:
    from gradprobe_hf.data.batch_checks import check_batches, check_reads_text
    from gradprobe_hf.data.labelled import ROWS_MEASURED, TaskOptions
    from gradprobe_hf.data.sources import is_plain_text
    from gradprobe_hf.data.text.paper_protocol import PaperSpec, paper_batches
    from gradprobe_hf.data.windows import WindowSpec, load_batches, window_length
    from gradprobe_hf.run.request.checks import check_columns

    if options.protocol == "paper" or is_plain_text(options.data):
        check_reads_text(measured.model, "data")
    if task is not None:
        task.check_length(options.sequence_length, measured.model.main_input_name)
    text = TextOptions(**given(options, *TEXT_OPTIONS))
    check_columns(text, options.data)
    if options.protocol == "paper":
        read = {name: value for name, value in asdict(text).items() if name in PAPER_OPTIONS}
        spec = PaperSpec(options.sequence_length, options.batch_size or PAPER_BATCH, **read)
        batches = paper_batches(options.data, measured.model, measured.tokenizer, spec)
    else:
        length = window_length(options.sequence_length, measured.model)
        batches = load_batches(
            options.data,
            WindowSpec(options.num_samples or SAMPLES, length, options.batch_size or BATCH, text=text),
            part="evaluation",
            model=measured.model,
            processing_class=measured.tokenizer,
            task=TaskOptions(task, options.label_column, None if options.num_samples else ROWS_MEASURED),
            is_alone=True,
            progress=shows_progress(options),
        )
    check_batches(measured.model, batches, "data", needs_loss=True)
    return batches
