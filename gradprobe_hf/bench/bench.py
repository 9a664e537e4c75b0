"""bench_pretrained: checkpoints side by side, what each takes and how fast it is.

The models take turns in every round, each in a process of its own, so that whatever else the machine does meets all of
them; a ratio is the median of those of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import try_to_load_from_cache
from tqdm.auto import tqdm

from gradprobe_hf.bench.result import BenchResult, BenchRow, Timing
from gradprobe_hf.bench.subject import Facts, Workload
from gradprobe_hf.bench.worker import Worker
from gradprobe_hf.checkpoint.file_sizes import FileSizes, checkpoint_files
from gradprobe_hf.model.loading.adapters import check_mergeable, stored_adapter
from gradprobe_hf.model.loading.checks import check_dtype, check_placement, check_source, load_errors
from gradprobe_hf.model.loading.load import SOURCE_KWARGS, load_config
from gradprobe_hf.report.build import versions
from gradprobe_hf.runtime.option_checks import one_of, whole
from gradprobe_hf.tasks.table import TASKS

PROMPT, NEW, REPEATS = 512, 32, 10
SOURCE = ("revision", "cache_dir", "subfolder")  # options of `from_pretrained` that say which files are a model's
WARMUP = 2  # rounds that are not counted: caches fill, kernels are chosen


class Asked(Protocol):
    """Who answers about one model: its process, or in tests the model itself."""

    def ask(self, method: str, *values: Any) -> Any: ...


def bench_pretrained(
    models: Sequence[str | Path],
    *,
    prompt_length: int | None = None,
    new_tokens: int = NEW,
    repeats: int = REPEATS,
    task: str | None = None,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> BenchResult:
    """Measure checkpoints side by side: parameters, bytes, memory, and the time to read and to write text.

    Each is loaded by a process of its own, all at once, and they take turns. What writes no text is measured by its
    forward pass alone.

    Args:
        models: Hub ids or folders; the first is what the others are compared with.
        prompt_length: tokens that are read. Default: 512, or as many as all of them take.
        new_tokens: tokens that are written, one text at a time, >= 2.
        repeats: rounds that count, after two that do not.
        task: what the models are for, as the Hub calls it. Default: what they were saved as.
        from_pretrained_kwargs: of all: `dtype`, `device_map` (default: a CUDA device if there is one), ...

    Raises:
        ValueError: a model or an option is wrong.
        OSError: no such model.
        ChildProcessError: a process ended, for want of memory say.
    """
    names = _checked_names(models)
    if prompt_length is not None:
        whole("prompt_length", prompt_length, 1)
    whole("new_tokens", new_tokens, 2)
    whole("repeats", repeats, 1)
    if task is not None:
        one_of("task", task, tuple(TASKS))
    check_dtype(from_pretrained_kwargs.get("dtype"))
    check_placement(from_pretrained_kwargs)
    for name in names:
        check_source(name, from_pretrained_kwargs)
    if torch.cuda.is_available():
        from_pretrained_kwargs.setdefault("device_map", "cuda")
    source = {key: value for key, value in from_pretrained_kwargs.items() if key in SOURCE}
    folded = _folded(names, from_pretrained_kwargs)
    with started(names, [("load", name, task, from_pretrained_kwargs | folded[name]) for name in names]) as workers:
        found = measured(names, workers, prompt_length, new_tokens, repeats, progress)
    return found.with_sizes([_sizes(name, source) for name in names])


def _folded(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """For each model whether an adapter is folded in, where that is asked for: others are measured beside it.

    Raises:
        ValueError: none of them is an adapter, or one is, and that was not asked for.
        OSError: there is no such model: before the others are loaded.
    """
    merge = bool(options.get("merge_adapters"))
    source = {key: value for key, value in options.items() if key in SOURCE_KWARGS}
    adapters = {}
    for name in names:
        with load_errors(name):
            adapters[name] = stored_adapter(name, source)
        if (adapter := adapters[name]) is not None:
            check_mergeable(adapter, merge)
        elif options.get("gguf_file") is None:
            load_config(name, **source)
    if not merge:
        return {name: {} for name in names}
    found = {name: {"merge_adapters": adapter is not None} for name, adapter in adapters.items()}
    if not any(one["merge_adapters"] for one in found.values()):
        raise ValueError(
            f"merge_adapters=True has no effect here: {' and '.join(map(repr, names))} "
            f"{'is no adapter' if len(names) == 1 else 'are no adapters'}. Leave it out."
        )
    return found


def measured(
    names: Sequence[str],
    workers: Sequence[Asked],
    prompt_length: int | None = None,
    new_tokens: int = NEW,
    repeats: int = REPEATS,
    progress: bool = True,
) -> BenchResult:
    """What is measured of models that are there; without the sizes of their files. Args: as `bench_pretrained`."""
    facts = [worker.ask("facts") for worker in workers]
    work = Workload(_prompt_length(names, facts, prompt_length, new_tokens), new_tokens)
    rounds = measured_rounds(workers, facts, work, repeats, progress)
    memory = [worker.ask("peak_bytes") for worker in workers]
    rows = [_row(*one) for one in zip(names, facts, memory, rounds, strict=True)]
    return BenchResult(
        rows=[row.beside(rows[0]) for row in rows],
        prompt_length=work.prompt_length if all(one.reads_text for one in facts) else None,
        new_tokens=new_tokens,
        repeats=repeats,
        device=facts[0].device,
        threads=facts[0].threads,
        versions=versions(),
    )


def _checked_names(models: Any) -> list[str]:
    if isinstance(models, (str, Path)):
        models = [models]
    if not isinstance(models, Sequence) or not models:
        raise ValueError(f"models must be one or more Hub ids or folders, got {models!r}.")
    for one in models:
        if not isinstance(one, (str, Path)):
            raise ValueError(
                f"models are named, by Hub ids or folders, since each is loaded by a process of its own; got a "
                f"{type(one).__name__}: save it first."
            )
    return [str(one) for one in models]


@contextmanager
def started(names: Sequence[str], made_by: Sequence[tuple[Any, ...]]) -> Iterator[list[Worker]]:
    """A worker for each model, ended with the `with`.

    Args:
        made_by: of each the method that makes it and its arguments, the last of them by name.
    """
    with ExitStack() as stack:
        workers = []
        for name, (method, *values, options) in zip(names, made_by, strict=True):
            workers.append(Worker(name, method, *values, **options))
            stack.callback(workers[-1].stop)
        yield workers


def _prompt_length(names: Sequence[str], facts: Sequence[Facts], asked: int | None, new_tokens: int) -> int:
    """That all of the models take, with what is written behind it.

    Raises:
        ValueError: one does not take what was asked for, or they read what cannot be compared.
    """
    length, reading = asked or PROMPT, {fact.reads_text: name for name, fact in zip(names, facts, strict=True)}
    if len(reading) > 1:
        raise ValueError(f"{reading[True]} reads text, and {reading[False]} none: measure them apart.")
    for name, fact in zip(names, facts, strict=True):
        if asked is not None and not fact.reads_text:
            raise ValueError(f"prompt_length={asked} has no effect here: {name} reads no text. Leave it out.")
        most = (fact.positions or length + new_tokens) - (new_tokens if fact.writes else 0)
        if most < 1:
            raise ValueError(
                f"new_tokens={new_tokens} leaves no room for a prompt in {name}: it takes {fact.positions}."
            )
        if asked is not None and asked > most:
            raise ValueError(
                f"prompt_length={asked} is more than {name} takes: {most}"
                + (f", with new_tokens={new_tokens} behind it." if fact.writes else ".")
            )
        length = min(length, most)
    return length


def measured_rounds(
    workers: Sequence[Asked], facts: Sequence[Facts], work: Workload, repeats: int, progress: bool = False
) -> list[dict[str, list[float]]]:
    """Of each model the values of every round that counts, by measurement."""
    found: list[dict[str, list[float]]] = [{} for _ in workers]
    bar = tqdm(range(-WARMUP, repeats), desc="rounds", disable=not progress, leave=False)
    for number in bar:
        # Who begins is another each time: what the machine does at the same moment of every round meets all.
        order = [(number + place) % len(workers) for place in range(len(workers))]
        for measure in (_prefill, _generate):
            for one in order:
                for name, value in measure(workers[one], facts[one], work).items():
                    if number >= 0:
                        found[one].setdefault(name, []).append(value)
    return found


def _prefill(worker: Asked, _: Facts, work: Workload) -> dict[str, float]:
    return {"prefill_seconds": worker.ask("prefill", work)}


def _generate(worker: Asked, facts: Facts, work: Workload) -> dict[str, float]:
    if not facts.writes:
        return {}
    made = worker.ask("generate", work)
    return {"first_token_seconds": made.first_token, "tokens_per_second": 1 / made.per_token}


def _sizes(name: str, source: Mapping[str, Any]) -> FileSizes | None:
    """Of the model's files; None where there are none on this machine."""
    options = dict(source)
    subfolder = options.pop("subfolder", None)
    if subfolder and Path(name).is_dir():
        files = checkpoint_files(Path(name, subfolder))
    elif subfolder:
        config = try_to_load_from_cache(name, f"{subfolder}/config.json", **options)
        files = checkpoint_files(Path(config).parent) if isinstance(config, str) else []
    else:
        files = checkpoint_files(name, **options)
    return FileSizes.of(files) if files else None


def _row(name: str, facts: Facts, memory: int, rounds: Mapping[str, list[float]]) -> BenchRow:
    timings: dict[str, Any] = {measurement: Timing.of(values) for measurement, values in rounds.items()}
    return BenchRow(
        model=name,
        cls=facts.cls,
        parameters=facts.parameters,
        dtype=facts.dtype,
        peak_memory_bytes=memory,
        **timings,
    )
