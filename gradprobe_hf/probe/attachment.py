"""Attachment: a model whose targets are routed through measured maps, for the body of a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.probe.folding import Masks, Probe
from gradprobe_hf.probe.measured import MeasuredEmbedding, MeasuredLinear
from gradprobe_hf.targets import Site, Target

OnInput = Callable[[Target, Site, Tensor], None]


@contextmanager
def serving(model: PreTrainedModel, targets: Sequence[Target], masks: Masks, factor: float = 0.0) -> Iterator[None]:
    """Run the model as if its masked weights were multiplied by `factor`, without touching them: forward only."""
    with attached(model, targets, Probe(shrunk=masks, factor=factor)), torch.no_grad():
        yield


@contextmanager
def attached(
    model: PreTrainedModel,
    targets: Sequence[Target],
    probe: Probe,
    on_input: OnInput | None = None,
) -> Iterator[None]:
    """Replace the forward of every module that uses a target; put all of them back at the end."""
    with ExitStack() as undo:
        for target in targets:
            for site in target.sites:
                module: Any = model.get_submodule(site.module)
                had = module.__dict__.get("forward")
                module.forward = _forward(module, target, site, probe, on_input)
                undo.callback(_put_back, module, had)
        yield


def _forward(
    module: Any,
    target: Target,
    site: Site,
    probe: Probe,
    on_input: OnInput | None,
) -> Callable[[Tensor], Tensor]:
    anchor = torch.zeros((), requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        weight = module.weight.t() if target.transposed else module.weight
        bias = getattr(module, "bias", None)
        if torch.is_grad_enabled():
            probe.count_use(target)
            if site.kind == "embedding":
                return MeasuredEmbedding.apply(x, weight, anchor, probe, target, site)
            return MeasuredLinear.apply(x, weight, bias, anchor, probe, target, site)
        if on_input is not None:
            on_input(target, site, x)
        weight = probe.served(target, weight)
        return F.embedding(x, weight) if site.kind == "embedding" else F.linear(x, weight, bias)

    return forward


def _put_back(module: Any, had: Any) -> None:
    if had is None:
        del module.forward
    else:
        module.forward = had
