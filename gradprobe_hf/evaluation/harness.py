"""Harness: tasks such as ARC and HellaSwag, scored by lm-evaluation-harness, its code and its protocol.

It is optional (`pip install lm-eval`) and imported when it is asked for.
"""

from __future__ import annotations

import difflib
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.patches import eval_mode

INSTALL = "pip install lm-eval"


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task.

    Attributes:
        metric: `acc`, `acc_norm`, ...; with the name of a filter of its answers, where there is one.
        stderr: of the value over the examples; None where the harness has none.
        higher_is_better: None where the task does not say.
        shots: examples before the question; None of a group whose tasks differ in it.
        samples: questions that were asked.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    shots: int | None
    samples: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TaskRequest:
    """What to ask.

    Attributes:
        names: of tasks, groups or tags.
        include_path: a folder with YAML files of further tasks.
        num_fewshot: examples before the question; None: as the task says.
        limit: the first so many questions of each task, for trying things out; None: all.
        batch_size: requests in one forward pass.
        progress: show the harness's progress bars.
    """

    names: Sequence[str]
    include_path: str | Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 4
    progress: bool = True


def check_tasks(request: TaskRequest) -> Any:
    """The harness's own table of tasks, once all that are asked for are in it.

    Raises:
        ImportError: the harness is not installed.
        ValueError: no such task or folder.
    """
    if find_spec("lm_eval") is None:
        raise ImportError(f"tasks are scored by lm-evaluation-harness, which is not installed: {INSTALL}.")
    if request.include_path is not None and not Path(request.include_path).is_dir():
        raise ValueError(f"include_path: there is no folder {str(request.include_path)!r}.")
    from lm_eval.tasks import TaskManager

    with _quiet():
        manager = TaskManager(include_path=None if request.include_path is None else str(request.include_path))
    for name in request.names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(map(repr, near))}?" if near else "`lm-eval ls tasks` lists them."
            raise ValueError(
                f"no task is called {name!r}: {hint} Tasks of your own are YAML files in the folder of --include-path."
            )
    return manager


def evaluate_tasks(
    model: PreTrainedModel, tokenizer: Any, request: TaskRequest, manager: Any = None
) -> list[TaskScore]:
    """Scores of a model that is loaded, wherever its weights are; it is left as it was.

    Args:
        manager: from `check_tasks`, where that was asked before the model was loaded.

    Raises:
        ImportError, ValueError: as `check_tasks`.
        OSError: the data of a task cannot be had.
    """
    manager = manager or check_tasks(request)
    if tokenizer is None:
        raise ValueError("tasks are text, and no tokenizer was found beside the model.")
    from datasets.exceptions import DatasetNotFoundError
    from lm_eval import simple_evaluate

    try:
        with _quiet(request.progress), eval_mode(model), torch.no_grad():
            found = simple_evaluate(
                _wrapped(model, tokenizer, request.batch_size),
                tasks=list(request.names),
                num_fewshot=request.num_fewshot,
                limit=request.limit,
                task_manager=manager,
                log_samples=False,
            )
    except (ConnectionError, DatasetNotFoundError) as error:
        raise OSError(
            f"the data of the tasks {', '.join(request.names)} cannot be loaded: {error} Without a network, name tasks "
            "whose YAML reads local files (--include-path)."
        ) from error
    return list(_scores(found))


def _wrapped(model: PreTrainedModel, tokenizer: Any, batch_size: int) -> Any:
    from lm_eval.models.huggingface import HFLM

    class Loaded(HFLM):
        """Inputs go where the model's first layer computes: an offloaded model says that it is on `meta`."""

        @property
        def device(self) -> torch.device:
            return input_device(self._model)

    return Loaded(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def _scores(found: Any) -> Iterator[TaskScore]:
    """The harness names a value `metric,filter`, and its error `metric_stderr,filter`."""
    for task, values in found["results"].items():
        # Of groups, MMLU say, it counts neither.
        parts = _tasks_of(found, task)
        shots = {int(found.get("n-shot", {}).get(one) or 0) for one in parts}
        samples = sum(int(found.get("n-samples", {}).get(one, {}).get("effective", 0)) for one in parts)
        for key, value in values.items():
            metric, comma, kept_by = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = values.get(f"{metric}_stderr,{kept_by}")
            yield TaskScore(
                task=task,
                metric=metric if kept_by == "none" else f"{metric} ({kept_by})",
                value=float(value),
                stderr=float(stderr) if isinstance(stderr, (int, float)) else None,
                higher_is_better=found.get("higher_is_better", {}).get(task, {}).get(metric),
                shots=min(shots) if len(shots) == 1 else None,
                samples=samples,
            )


def _tasks_of(found: Any, name: str) -> list[str]:
    """The tasks of a group, and of the groups in it; of a task itself."""
    within = found.get("group_subtasks", {}).get(name, [])
    return [task for one in within for task in _tasks_of(found, one)] or [name]


@contextmanager
def _quiet(progress: bool = True) -> Iterator[None]:
    """Its warnings are about arguments that are not used here; its progress bars can only be sent away."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if progress else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
