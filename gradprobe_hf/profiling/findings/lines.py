"""Lines that waste time: calls of PyTorch that a watch has seen."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from gradprobe_hf.profiling.findings.finding import Check, Finding, finding, located, milliseconds
from gradprobe_hf.profiling.observing.observation import Call, CallKind, Observation


@dataclass(frozen=True)
class _Lines:
    """One kind of call as a kind of finding.

    Attributes:
        name: of the finding.
        evidence: behind what was called, how often and for how long; {detail}, {asked} and {waits} are filled in.
        least_steps: with at least one call.
        least_a_step: calls a step, on average.
        library_remedy: where a library makes the call on behalf of the line; "": the same.
    """

    name: str
    calls: CallKind
    evidence: str
    remedy: str
    least_steps: int = 1
    least_a_step: float = 0.0
    library_remedy: str = ""

    def find(self, seen: Observation) -> list[Finding]:
        return [self._of(seen, call) for call in seen.calls if call.kind == self.calls and self._counts(seen, call)]

    def _counts(self, seen: Observation, call: Call) -> bool:
        return call.steps >= self.least_steps and call.count >= self.least_a_step * seen.located

    def _of(self, seen: Observation, call: Call) -> Finding:
        often = f"{call.what}, {call.count / seen.located:.3g} a step, {milliseconds(call.seconds)}"
        asked = seen.setup.asked if seen.setup else None
        more = self.evidence.format(detail=call.detail, asked=asked, waits=_waits(seen))
        via = f" in {call.place.through}" if call.place and call.place.through else ""
        remedy = self.library_remedy if via and self.library_remedy else self.remedy
        return finding(self.name, call.place, call.seconds / median(seen.timed), often + via + more, remedy)


def _waits(seen: Observation) -> str:
    if seen.device != "cpu":
        return "on an accelerator, the program waits there until the device has done all its work"
    return "this run is on the CPU, where nothing is in flight; on a GPU the same line waits for all its work"


_SYNCHRONIZATION = _Lines(
    "synchronization",
    "synchronization",
    "; {waits}",
    "keep it as a tensor (total += loss.detach()), and read it every 50 steps or at the end",
    library_remedy="a library reads it on behalf of this line: an option of it may leave that out, or do it every 50 "
    "steps (logging_steps); else it is the library's to change",
)
_PRINT = _Lines(
    "print",
    "print",
    "; each formats the tensor, reading it back",
    "print a number, and not in each step: if step % 50 == 0: print(loss.item())",
)
_CONSTANT = _Lines(
    "constant tensor",
    "constant",
    ", of shape {detail}, with the same values each time",
    "make it once and keep it: self.register_buffer(name, tensor, persistent=False)",
    least_steps=2,
)
_NORMS = _Lines(
    "norms one by one",
    "norm",
    ", each of one parameter or gradient",
    "take all of them at once: torch.nn.utils.clip_grad_norm_(model.parameters(), ...) returns the norm",
    least_a_step=4,  # a loop over parameters
)
_CASTS = _Lines(
    "cast of a weight",
    "cast",
    "; {detail}, the same weight each time",
    "keep a copy in this dtype, load the model in it (dtype=torch.bfloat16), or leave it to torch.autocast, which "
    "casts each weight once in a forward pass",
    least_steps=2,
)
_FLOAT32 = _Lines(
    "float32 product",
    "matmul",
    " in forward alone; its result is float32, where the run is to be in {asked}",
    "leave out .float() and autocast(enabled=False) around it, or load that module in the dtype of the others; keep "
    "float32 for losses, norms and sums",
)
_ATTENTION = _Lines(
    "eager attention",
    "attention",
    " in forward alone, for products and softmax",
    "model.set_attn_implementation('sdpa'), or attn_implementation='sdpa' in from_pretrained; on CUDA also "
    "'flash_attention_2' or '3'. Attention weights (output_attentions) need eager",
)
_ZEROING = _Lines(
    "zeroed gradients",
    "zeroing",
    "; each gradient is filled with zeros, and then added to",
    "optimizer.zero_grad(), whose default set_to_none=True lets the next backward pass write gradients, not add",
)


def _located_twice(seen: Observation) -> str | None:
    return located(seen) or (None if seen.located > 1 else "it takes two steps to see a tensor made again")


def _asked(seen: Observation) -> str | None:
    if reason := located(seen):
        return reason
    asked = seen.setup is not None and seen.setup.asked is not None
    return None if asked else "neither weights nor autocast asked for bfloat16 or float16"


def _has_attention(seen: Observation) -> str | None:
    if reason := located(seen):
        return reason
    known = seen.setup is not None and seen.setup.attention
    return None if known else "no model of transformers with more than one implementation was seen"


def _flash(seen: Observation) -> str | None:
    """Always some reason, but where it is in use: what it would take is known when it was tried."""
    if reason := _has_attention(seen):
        return reason
    assert seen.setup is not None
    if any(name.startswith("flash") for name in seen.setup.attention):
        return None
    if seen.device.partition(":")[0] != "cuda":
        return f"FlashAttention has kernels for CUDA alone, and this run is on {seen.device}"
    return "what it would take is known when it was tried: gradprobe profile script ... --fix flash"


LINES = {
    "synchronization": Check("Python waits for a value on the device", located, _SYNCHRONIZATION.find),
    "print": Check("a tensor is formatted as text", located, _PRINT.find),
    "constant tensor": Check("a line makes the same tensor in each step", _located_twice, _CONSTANT.find),
    "norms one by one": Check("norms of parameters or gradients in a Python loop", located, _NORMS.find),
    "cast of a weight": Check("a weight is cast in each step", located, _CASTS.find),
    "float32 product": Check("matrices are multiplied in float32 in a run in half precision", _asked, _FLOAT32.find),
    "eager attention": Check("attention in plain PyTorch", _has_attention, _ATTENTION.find),
    "flash attention": Check("what FlashAttention would take", _flash, lambda _: []),
    "zeroed gradients": Check("gradients are zeroed, not dropped", located, _ZEROING.find),
}
