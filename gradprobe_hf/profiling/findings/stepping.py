"""The optimizer: how it steps, and gradients that are made for nothing."""

from __future__ import annotations

from math import isfinite
from statistics import median

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, gigabytes, milliseconds, timed
from gradprobe_hf.profiling.observing.observation import Observation

_SPIKE, _CLIP = 5.0, 1.0  # times the largest norm before; what transformers clips at by default
_NORMS = 3  # of steps, from which on one may be called a spike


def _one_by_one(seen: Observation) -> list[Finding]:
    setup = seen.setup
    assert setup is not None
    if setup.steps_by != "one by one":
        return []
    seconds, total = seen.stages["optimizer"], sum(seen.stages.values())
    how = "fused=True" if setup.has_fused else "foreach=True"
    named = "; in TrainingArguments optim='adamw_torch_fused'" if setup.optimizer == "AdamW" and setup.has_fused else ""
    others = setup.optimizers - 1
    all_of_them = f"with {others} other optimizer{'s' * (others > 1)}" if others else "in all"
    return [
        finding(
            "optimizer",
            setup.stepped_at,
            seconds / total,
            f"{setup.optimizer} steps {setup.tensors or 'its'} tensors one after the other, "
            f"{milliseconds(seconds / len(seen.timed))} {all_of_them}; a part of that can be had",
            f"torch.optim.{setup.optimizer}(..., {how}){named}",
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


def _spikes(seen: Observation) -> list[Finding]:
    norms = seen.gradient_norms  # those of a training that goes well fall
    if not all(map(isfinite, norms)):  # no other norm is more or less than NaN
        return [_not_finite(seen)]
    spikes = [at for at in range(_NORMS - 1, len(norms)) if norms[at] > _SPIKE * max(norms[:at])]
    if not spikes:
        return []
    highest, usual = norms[spikes[0]], median(norms[: spikes[0]])
    return [
        finding(
            "gradient spikes",
            seen.setup.stepped_at if seen.setup else None,
            None,
            f"the optimizer stepped with a gradient of norm {highest:.3g}, where {usual:.3g} was usual in {spikes[0]} "
            "steps before: nothing clips it, or at more than that. It takes no time, and may take the training back",
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {_CLIP:g}) before optimizer.step(); max_grad_norm in "
            "TrainingArguments",
        )
    ]


def _not_finite(seen: Observation) -> Finding:
    norms = seen.gradient_norms
    first = next(at for at, norm in enumerate(norms) if not isfinite(norm))
    return finding(
        "gradient spikes",
        seen.setup.stepped_at if seen.setup else None,
        None,
        f"the optimizer stepped with a gradient that is no finite number, in step {first + 1} of {len(norms)} that "
        "were looked at: weights that it reached are no numbers from there on",
        "torch.autograd.set_detect_anomaly(True) names the operation that makes the first; error_if_nonfinite=True in "
        "torch.nn.utils.clip_grad_norm_ ends the run before such a step",
    )


def _float32(seen: Observation) -> list[Finding]:
    assert seen.setup is not None
    if seen.setup.asked or seen.setup.float32_products != "highest":
        return []
    return [
        finding(
            "float32 precision",
            None,
            None,
            f"{seen.device}: products of matrices are in full float32; what TF32 or bfloat16 gains is not known before "
            "it is tried",
            "torch.set_float32_matmul_precision('high') for TF32 (tf32=True in TrainingArguments); or bf16=True: "
            "gradprobe profile script ... --fix precision measures it",
        )
    ]


def _has_norms(seen: Observation) -> str | None:
    if reason := _stepped(seen):
        return reason
    few = len(seen.gradient_norms) < _NORMS
    return f"it takes {_NORMS} steps whose gradients could be looked at" if few else None


def _has_tf32(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    known = seen.setup is not None and seen.setup.float32_products is not None
    return None if known else f"{seen.device} is not known to have TF32"


def _stepped(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    return None if seen.setup is not None and seen.setup.optimizer else "no torch.optim optimizer was seen"


def _steps_all(seen: Observation) -> str | None:
    if reason := _stepped(seen):
        return reason
    leaves_out = seen.setup is not None and seen.setup.leaves_out_gradients
    return "SelectiveUpdateCallback drops some gradients before each step, not always the same" if leaves_out else None


def _says_how(seen: Observation) -> str | None:
    if reason := _stepped(seen):
        return reason
    assert seen.setup is not None
    return None if seen.setup.steps_by else f"{seen.setup.optimizer} does not say how it steps its tensors"


STEPPING = {
    "optimizer": Check("the optimizer steps tensor by tensor", _says_how, _one_by_one),
    "parameter without gradient": Check("a trained parameter gets no gradient", _steps_all, _without_gradient),
    "gradient without optimizer": Check("a gradient is made that nobody steps", _stepped, _without_optimizer),
    "gradient spikes": Check("gradients far larger than usual, or no numbers, are stepped with", _has_norms, _spikes),
    "float32 precision": Check("a GPU multiplies in full float32", _has_tf32, _float32),
}
