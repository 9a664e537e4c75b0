"""The Fisher information of rows: a weight update weighs them by it, when the statistics of the probes are gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.matrix import MatrixStatistics
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.scores.fisher import estimated_fisher


def row_fisher(context: RunContext, targets: Sequence[Target], statistics: Statistics) -> dict[str, list[float]]:
    """The mean Fisher information of the weights of each row, `[out]`, by target; of none where nothing reads it.

    Matrices that the loss does not depend on have none. Collectives where the model is sharded.
    """
    config = context.config
    is_read = config.update_row.weighs_rows or context.keeps_row_fisher
    if not is_read or not config.uses_fisher:
        return {}
    found = {}
    for target in targets:
        if statistics[target.name].reached:
            rows = _of_rows(target, statistics[target.name], config.fisher)
            if is_sharded(context.model):
                context.processes.sum_(rows)
            found[target.name] = rows.tolist()
    return found


def _of_rows(target: Target, statistics: MatrixStatistics, estimate: str) -> Tensor:
    """Of one matrix, `[out]`; of a sharded one this process's share of it."""
    found, region = torch.zeros(target.shape[0], dtype=torch.float64), statistics.region
    for chunk in row_chunks(region.shape) if 0 not in region.shape else ():
        rows = slice(region.rows.start + chunk.start, region.rows.start + chunk.stop)
        mean = estimated_fisher(statistics, estimate, rows).mean(1)
        found[rows] = mean.double().cpu() * (region.shape[1] / target.shape[1])
    return found
