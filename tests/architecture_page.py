"""What is seen of each architecture on its way through prune, save, load and pipeline; and the page that shows it.

`python -m tests.architecture_page` writes docs/architectures.md; tests/test_architectures.py holds it to what is seen.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, pipeline

from gradprobe_hf import GradProbeConfig, PruneResult, prune_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint, pattern_holds
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.model.loading.load import load_config, skeleton
from gradprobe_hf.model.parameters import aliases
from gradprobe_hf.model.passes.loss import forward_only, summed_loss
from gradprobe_hf.model.targets import find_targets
from tests.architectures import ARCHITECTURES, Architecture

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
WAYS: dict[str, dict[str, Any]] = {
    "one probe": {"preset": "fast"},
    "`best`": {"preset": "best"},
    "`2:4`": {"pattern": "2:4"},
}
PARTS = ("tokenizer", "image_processor", "feature_extractor", "processor")
HEADER = """# Architectures

Each row is a tiny random model of its class. It was saved with its tokenizer or processor, pruned, saved, loaded again
by its Auto class and run in its pipeline, where it answers as the model in memory does. "Yes" also says that

- the budget is met to the weight, and zeros are where the report says;
- the loss that was measured before anything was written is that of the checkpoint;
- tied weights are still one weight;
- with `device_map="disk"` the same weights go.

"Refused" is an error before any work that names what to do.

`make architectures` writes this page, and `make test-all` fails where it says anything else than what is seen.

Real checkpoints differ in size and in what they have learned; what pruning costs them is measured on
[a few](method.md#results). What is a target in which family stands in
[Prune other models](guides/other-models.md#what-is-pruned).

"""


@dataclass(frozen=True)
class Row:
    """What is seen of one architecture: a cell for each way to prune it."""

    cells: dict[str, str]
    run_by: str


def seen(architecture: Architecture, folder: Path, ways: Collection[str] = tuple(WAYS)) -> Row:
    """Everything that the page says about an architecture, each claim checked."""
    source = folder / "model"
    architecture.save(source)
    cells = {way: _pruned(architecture, source, folder / f"pruned-{n}", way) for n, way in enumerate(ways)}
    return Row(cells, _run_by(architecture))


def _pruned(architecture: Architecture, source: Path, out: Path, way: str) -> str:
    config, batches = GradProbeConfig(**WAYS[way]), architecture.batches()
    prune = partial(prune_pretrained, source, config, calibration=batches, evaluation=batches, progress=False)
    if way in architecture.refused:
        with pytest.raises(ValueError, match=r"[Uu]se .*update='none'"):
            prune(output_dir=out)
        assert not out.exists()
        return "refused"
    result = prune(output_dir=out)
    _check_zeros(result, config)
    loaded = architecture.auto.from_pretrained(out).eval()
    assert type(loaded) is type(result.model)
    _check_loss(result.report.evaluation["pruned"]["loss"], loaded, batches)
    assert _outputs(loaded, batches[0]) == _outputs(result.model, batches[0])
    assert aliases(loaded) == aliases(result.model) == aliases(architecture.make())
    assert _answers(architecture, out, None) == _answers(architecture, out, result.model)
    if architecture.offloads:
        _check_on_disk(source, config, batches, result)
    found = inspect_checkpoint(out)
    assert {row.name: row.zeros for row in found.rows} == {row.name: row.zeros_after for row in result.report.matrices}
    model = skeleton(load_config(str(source)))
    # What no batch reaches is out of the budget, which an estimate without batches cannot know.
    left_out = sum(one.weights for one in result.report.unreached)
    assert estimate(model, find_targets(model), config).target_weights == found.weights + left_out
    return "yes"


def _check_zeros(result: PruneResult, config: GradProbeConfig) -> None:
    """The budget to the weight, and zeros where the report says."""
    total = sum(target.numel for target in result.targets)
    pruned = sum(int(mask.sum()) for mask in result.masks.values())
    assert pruned == round(config.sparsity * total)
    for target, row in zip(result.targets, result.report.matrices, strict=True):
        matrix, mask = target.matrix(result.model), result.masks[target.name]
        assert row.name == target.name
        assert (matrix[mask] == 0).all()
        assert int((matrix == 0).sum()) == row.zeros_after
        assert config.group is None or pattern_holds(matrix, *config.group)


def _check_loss(measured: float, model: PreTrainedModel, batches: list[dict[str, Any]]) -> None:
    """What was measured before the weights were written is the loss of the checkpoint."""
    with torch.no_grad():
        losses = [summed_loss(model, batch) for batch in batches]
    assert measured == pytest.approx(float(sum(loss for loss, _ in losses) / sum(terms for _, terms in losses)))


def _check_on_disk(source: Path, config: GradProbeConfig, batches: list[dict[str, Any]], result: PruneResult) -> None:
    """The same masks where no weight is in memory."""
    offloaded = prune_pretrained(
        source, config, calibration=batches, evaluation=False, apply=False, progress=False, device_map="disk"
    )
    assert all(torch.equal(offloaded.masks[name], mask) for name, mask in result.masks.items())


def _outputs(model: PreTrainedModel, batch: dict[str, Any]) -> list[list[float]]:
    with torch.no_grad():
        found = forward_only(model, batch)
    return [value.flatten().tolist() for value in tree_leaves(found) if isinstance(value, Tensor)]


def _answers(architecture: Architecture, folder: Path, model: PreTrainedModel | None) -> Any:
    """What the pipeline of a folder says, or of a model in memory with the folder's tokenizer or processor."""
    if not architecture.task:
        model = architecture.auto.from_pretrained(folder) if model is None else model
        return model.generate(architecture.batches()[0]["input_ids"], max_new_tokens=4, do_sample=False).tolist()
    if architecture.process is None:
        return None
    run = pipeline(architecture.task, model=str(folder), device="cpu")
    if model is not None:
        run = pipeline(
            architecture.task,
            model=model,
            device="cpu",
            **{part: getattr(run, part) for part in PARTS if getattr(run, part, None) is not None},
        )
    return _plain(run(**architecture.ask))


def _plain(value: Any) -> Any:
    """Values that compare: pictures as their pixels."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return np.asarray(value).tolist() if hasattr(value, "size") else value


def _run_by(architecture: Architecture) -> str:
    if not architecture.task:
        return "`generate`"
    return f"`{architecture.task}`" if architecture.process else "its Auto class alone"


def line(architecture: Architecture, row: Row) -> str:
    """A row of the page."""
    cls = type(architecture.make()).__name__
    cells = [architecture.name, f"`{cls}`", *row.cells.values(), row.run_by, architecture.note]
    return "| " + " | ".join(cells) + " |"


def page(rows: dict[str, Row]) -> str:
    """The whole page, by kinds."""
    text = HEADER
    for kind in dict.fromkeys(architecture.kind for architecture in ARCHITECTURES):
        text += f"## {kind[0].upper()}{kind[1:]}\n\n"
        text += f"| architecture | class | {' | '.join(WAYS)} | run by | |\n|---|---|{'---|' * len(WAYS)}---|---|\n"
        text += "".join(f"{line(one, rows[one.name])}\n" for one in ARCHITECTURES if one.kind == kind) + "\n"
    return text.rstrip() + "\n"


def main() -> None:
    rows = {}
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            rows[architecture.name] = seen(architecture, Path(folder))
        print(line(architecture, rows[architecture.name]))
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
