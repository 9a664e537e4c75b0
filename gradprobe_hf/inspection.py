"""Inspection: what sparsity a checkpoint's files really hold. Reads tensors one at a time; the model is never built.

The matrices are those `find_targets` would prune, found on the meta device from `config.json` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from gradprobe_hf.config import CONFIG_NAME, GradProbeConfig
from gradprobe_hf.loading import model_class
from gradprobe_hf.report import Group, grouped
from gradprobe_hf.targets import Target, find_targets

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
    """Attributes: `rows`, one per matrix, and `patterns`, the n:m patterns that hold in every one of them."""

    rows: list[MatrixSparsity]
    patterns: list[str]

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
            name: [{"label": g.label, "weights": g.weights, "zeros": g.zeros, "sparsity": g.sparsity} for g in self.by(key)]
            for name, key in (("blocks", "block"), ("kinds", "role"))
        }
        matrices = [
            {"name": row.name, "shape": list(row.shape), "zeros": row.zeros, "sparsity": row.sparsity}
            for row in self.rows
        ]
        totals = {"sparsity": self.sparsity, "weights": self.weights, "zeros": self.zeros, "patterns": self.patterns}
        return {**totals, **groups, "matrices": matrices}


def inspect_checkpoint(directory: str | Path) -> Inspection:
    """Count the zeros in a checkpoint's safetensors files.

    Raises:
        ValueError: not a folder with `config.json` and safetensors files, or none of the matrices is in them.
    """
    path = Path(directory)
    files = weight_files(path)
    targets = {target.name: target for target in _targets(path)}
    holding = set(PATTERNS)
    rows = []
    for name, tensor in _tensors(path, files):
        target = targets.pop(name, None)
        if target is None:
            continue
        matrix = tensor.t() if target.transposed else tensor
        zeros = int((matrix == 0).sum())
        rows.append(MatrixSparsity(name, target.block, target.role, target.shape, target.numel, zeros))
        holding = {group for group in holding if pattern_holds(matrix, *group)}
    if not rows:
        raise ValueError(f"none of the matrices of {path / 'config.json'} is in the files of {path}.")
    rows.sort(key=lambda row: _natural(row.name))
    return Inspection(rows, [f"{n}:{m}" for n, m in sorted(holding)])


def weight_files(path: Path) -> dict[str, list[str] | None]:
    """File name -> the tensors to read from it (None: all)."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is not a checkpoint folder: it has no config.json.")
    if (path / SAFE_WEIGHTS_INDEX_NAME).is_file():
        index = json.loads((path / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        files: dict[str, list[str] | None] = {}
        for name, file in index.items():
            files.setdefault(file, []).append(name)  # type: ignore[union-attr]  # the lists are made here
        return files
    if (path / SAFE_WEIGHTS_NAME).is_file():
        return {SAFE_WEIGHTS_NAME: None}
    raise ValueError(f"{path} has no safetensors weights ({SAFE_WEIGHTS_NAME}); save the model with save_pretrained first.")


def pattern_holds(matrix: Tensor, n: int, m: int) -> bool:
    """Whether every m consecutive inputs of every row keep at most n weights. Matrix `[out, in]`.

    >>> import torch
    >>> pattern_holds(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), 2, 4), pattern_holds(torch.tensor([[1.0, 2.0]]), 1, 2)
    (True, False)
    """
    if matrix.shape[1] % m:
        return False
    return bool(((matrix != 0).reshape(-1, m).sum(1) <= n).all())


def _targets(path: Path) -> tuple[Target, ...]:
    """What was pruned, when the folder says so, else what would be by default."""
    config = AutoConfig.from_pretrained(path)
    cls = model_class(config)
    with init_empty_weights():
        skeleton = cls.from_config(config) if cls is AutoModelForCausalLM else cls(config)
    chosen = GradProbeConfig.from_pretrained(path) if (path / CONFIG_NAME).is_file() else GradProbeConfig()
    return find_targets(skeleton, chosen.include, chosen.exclude)


def _tensors(path: Path, files: dict[str, list[str] | None]) -> Iterator[tuple[str, Tensor]]:
    with ExitStack() as opened:
        for file, names in files.items():
            handle = opened.enter_context(safe_open(path / file, framework="pt"))
            for name in handle.keys() if names is None else names:
                yield name, handle.get_tensor(name)


def _natural(name: str) -> Sequence[tuple[int, str]]:
    """Block 10 after block 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
