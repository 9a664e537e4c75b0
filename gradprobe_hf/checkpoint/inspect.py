"""Inspection: what sparsity a checkpoint's files really hold.

The matrices are those `find_targets` would prune, found on the meta device from `config.json` alone; tensors are read
one at a time. Some families (ViT, mixtures of experts) are stored under other names or in other pieces than they have
in memory: those are loaded, since only transformers knows the way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from gradprobe_hf.config.config import CONFIG_NAME, GradProbeConfig
from gradprobe_hf.model.loading.checks import index_of
from gradprobe_hf.model.loading.load import load_config, load_model, skeleton
from gradprobe_hf.model.pooler import take_off_pooler
from gradprobe_hf.model.targets import Target, find_targets
from gradprobe_hf.report.report import REPORT_NAME, Group, grouped
from gradprobe_hf.runtime.paths import expanded

PATTERNS = ((1, 2), (1, 4), (2, 4), (4, 8))


@dataclass(frozen=True)
class MatrixSparsity:
    """One matrix of a file: which, how large `[out, in]`, and how many of its weights are exactly zero."""

    name: str
    block: str
    role: str
    shape: tuple[int, int]
    weights: int
    zeros: int

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights


@dataclass(frozen=True)
class Inspection:
    """What is in the files.

    Attributes:
        rows: one per matrix that was pruned, or that a default configuration would prune.
        patterns: the n:m patterns that hold in every one of them.
        left_out: matrices that the run left out of its budget, because its calibration did not reach them.
        excluded: matrices of blocks that its `include` and `exclude` left dense.
    """

    rows: list[MatrixSparsity]
    patterns: list[str]
    left_out: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        return sum(row.weights for row in self.rows)

    @property
    def zeros(self) -> int:
        return sum(row.zeros for row in self.rows)

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights

    def by(self, attribute: str) -> list[Group]:
        return grouped((getattr(row, attribute), row.weights, row.zeros) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        groups = {
            name: [
                {"label": g.label, "weights": g.weights, "zeros": g.zeros, "sparsity": g.sparsity} for g in self.by(key)
            ]
            for name, key in (("blocks", "block"), ("kinds", "role"))
        }
        matrices = [
            {"name": row.name, "shape": list(row.shape), "zeros": row.zeros, "sparsity": row.sparsity}
            for row in self.rows
        ]
        totals = {"sparsity": self.sparsity, "weights": self.weights, "zeros": self.zeros, "patterns": self.patterns}
        for name in ("left_out", "excluded"):
            totals |= {name: list(getattr(self, name))} if getattr(self, name) else {}
        return {**totals, **groups, "matrices": matrices}


def inspect_checkpoint(directory: str | Path, *, trust_remote_code: bool | None = None) -> Inspection:
    """Count the zeros in a checkpoint's safetensors files.

    Args:
        trust_remote_code: whether model code that comes with the checkpoint may run; None: transformers asks.

    Raises:
        ValueError: not a folder with `config.json` and safetensors files, or files that are damaged.
    """
    path = Path(expanded(directory))
    if not str(directory) or not path.is_dir():
        what = f"{str(directory)!r} is not a folder" if path.is_file() else f"no such folder: {str(directory)!r}"
        raise ValueError(f"{what}. Inspected are the files of a checkpoint folder on this machine.")
    files = weight_files(path)
    own_code = {} if trust_remote_code is None else {"trust_remote_code": trust_remote_code}
    stored = {name for names in files.values() for name in names}
    model = skeleton(load_config(str(path), **own_code), trust_remote_code=trust_remote_code)
    take_off_pooler(model, {name for name, _ in model.named_parameters()} - stored)
    chosen = GradProbeConfig.from_pretrained(path) if (path / CONFIG_NAME).is_file() else GradProbeConfig()
    targets = {target.name: target for target in find_targets(model, chosen.include, chosen.exclude)}
    by_default = find_targets(model) if chosen.include or chosen.exclude else ()
    excluded = tuple(target.name for target in by_default if target.name not in targets)
    left_out = tuple(name for name in _unreached(path) if targets.pop(name, None))
    found = _from_files(path, files, targets) if stored >= set(targets) else _from_model(path, targets, own_code)
    rows, holding = [], {*PATTERNS, *([chosen.group] if chosen.group else [])}
    for target, matrix in found:
        zeros = int((matrix == 0).sum())
        rows.append(MatrixSparsity(target.name, target.block, target.role, target.shape, target.numel, zeros))
        holding = {group for group in holding if pattern_holds(matrix, *group)}
    places = {name: place for place, name in enumerate(targets)}
    rows.sort(key=lambda row: places[row.name])
    return Inspection(rows, [f"{n}:{m}" for n, m in sorted(holding)], left_out, excluded)


def _unreached(path: Path) -> list[str]:
    """What the report of the run says it left out; a checkpoint of somebody else's has none."""
    if not (path / REPORT_NAME).is_file():
        return []
    try:
        values = json.loads((path / REPORT_NAME).read_text(encoding="utf-8"))
        return [one["name"] for one in values.get("unreached", [])]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path / REPORT_NAME} is damaged ({error}): delete it, and all matrices count.") from error


def weight_files(path: Path) -> dict[str, list[str]]:
    """File name -> the tensors in it; of what transformers loads, a file before an index."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is not a checkpoint folder: it has no config.json.")
    if (path / SAFE_WEIGHTS_NAME).is_file():
        with _opened(path / SAFE_WEIGHTS_NAME) as handle:
            return {SAFE_WEIGHTS_NAME: list(handle.keys())}
    if (path / SAFE_WEIGHTS_INDEX_NAME).is_file():
        files: dict[str, list[str]] = {}
        for name, file in index_of(path / SAFE_WEIGHTS_INDEX_NAME).items():
            files.setdefault(file, []).append(name)
        if missing := [file for file in files if not (path / file).is_file()]:
            raise ValueError(f"{path} has no {missing[0]}, which its index names; fetch it again.")
        return files
    raise ValueError(f"{path} has no safetensors weights ({SAFE_WEIGHTS_NAME}); write them with save_pretrained.")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut off: {error}; fetch it again.") from error


def pattern_holds(matrix: Tensor, n: int, m: int) -> bool:
    """Whether every m consecutive inputs of every row keep at most n weights. Matrix `[out, in]`.

    >>> import torch
    >>> pattern_holds(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), 2, 4), pattern_holds(torch.tensor([[1.0, 2.0]]), 1, 2)
    (True, False)
    """
    if matrix.shape[1] % m:
        return False
    return bool(((matrix != 0).reshape(-1, m).sum(1) <= n).all())


def _from_files(path: Path, files: dict[str, list[str]], targets: dict[str, Target]) -> Iterator[tuple[Target, Tensor]]:
    for file, names in files.items():
        with _opened(path / file) as handle:
            for name in names:
                if target := targets.get(name):
                    tensor = handle.get_tensor(name)
                    matrix = tensor.t() if target.transposed else tensor
                    if tuple(matrix.shape) != target.shape:
                        raise ValueError(
                            f"{name} of {path / file} is {tuple(tensor.shape)}, which is not what config.json has: "
                            f"{target.shape} [out, in]."
                        )
                    yield target, matrix


def _from_model(path: Path, targets: dict[str, Target], own_code: dict[str, bool]) -> Iterator[tuple[Target, Tensor]]:
    model = load_model(str(path), **own_code)
    return ((target, target.matrix(model)) for target in targets.values())
