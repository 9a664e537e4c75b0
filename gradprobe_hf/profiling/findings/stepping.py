"""The optimizer: how it steps, and gradients that are made for nothing."""

from __future__ import annotations

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, gigabytes, milliseconds, timed
from gradprobe_hf.profiling.observing.observation import Observation


def _one_by_one(seen: Observation) -> list[Finding]:
    setup = seen.setup
    assert setup is not None
    if setup.steps_by != "one by one":
        return []
    seconds, total = seen.stages["optimizer"], sum(seen.stages.values())
    how = "fused=True" if setup.has_fused else "foreach=True"
    return [
        finding(
            "optimizer",
            setup.stepped_at,
            seconds / total,
            f"{setup.optimizer} steps {setup.tensors or 'its'} tensors one after the other, "
            f"{milliseconds(seconds / len(seen.timed))} in all; a part of that can be had",
            f"torch.optim.{setup.optimizer}(..., {how}); in TrainingArguments optim='adamw_torch_fused'",
        )
    ]


def _without_gradient(seen: Observation) -> list[Finding]:
    assert seen.setup is not None
    names = seen.setup.without_gradient
    if not names:
        return []
    evidence = f"the optimizer has {', '.join(names)}, and no step of the warm-up gave it a gradient"
    remedy = (
        "freeze it (requires_grad_(False)) or leave it out of the optimizer; DistributedDataParallel needs "
        "find_unused_parameters=True with it, which costs a walk over the graph"
    )
    return [finding("parameter without gradient", seen.setup.stepped_at, None, evidence, remedy)]


def _without_optimizer(seen: Observation) -> list[Finding]:
    assert seen.setup is not None
    names = seen.setup.without_optimizer
    if not names:
        return []
    evidence = (
        f"{', '.join(names)}: backward makes gradients of {gigabytes(seen.setup.wasted_bytes)} that no optimizer "
        "steps and optimizer.zero_grad() does not drop"
    )
    remedy = "requires_grad_(False) on what is not trained: its gradient's matrix products and memory are saved"
    return [finding("gradient without optimizer", seen.setup.stepped_at, None, evidence, remedy)]


def _stepped(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    return None if seen.setup is not None and seen.setup.optimizer else "no torch.optim optimizer was seen"


def _says_how(seen: Observation) -> str | None:
    if reason := _stepped(seen):
        return reason
    assert seen.setup is not None
    return None if seen.setup.steps_by else f"{seen.setup.optimizer} does not say how it steps its tensors"


STEPPING = {
    "optimizer": Check("the optimizer steps tensor by tensor", _says_how, _one_by_one),
    "parameter without gradient": Check("a trained parameter gets no gradient", _stepped, _without_gradient),
    "gradient without optimizer": Check("a gradient is made that nobody steps", _stepped, _without_optimizer),
}
