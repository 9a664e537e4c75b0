"""Findings: what an observation shows to be wasted. One row per kind; no other code asks which kind it is.

A row is a pure function: one observation gives the same findings each time. Shares are of steps that were only timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gradprobe_hf.profiling.observation import Call, CallKind, Observation
from gradprobe_hf.profiling.places import Place

Severity = Literal["high", "medium", "low"]
_HIGH, _MEDIUM = 0.1, 0.01  # shares of the step from which on a finding is called so
_MANY = 4  # norms a step from one line: a loop over parameters


@dataclass(frozen=True)
class Finding:
    """Attributes:
    file, line: of the user's own frame; None where no line of it was seen.
    share: of a step, in [0, 1].
    evidence: what was measured.
    remedy: what to write instead.
    """

    kind: str
    file: str | None
    line: int | None
    share: float
    evidence: str
    remedy: str

    @property
    def severity(self) -> Severity:
        return "high" if self.share >= _HIGH else "medium" if self.share >= _MEDIUM else "low"


@dataclass(frozen=True)
class Check:
    """A kind of finding.

    Attributes:
        looks_for: a sentence for the page and the report.
        unknown: why an observation cannot tell; None if it can.
        find: the findings, in any order.
    """

    looks_for: str
    unknown: Callable[[Observation], str | None]
    find: Callable[[Observation], list[Finding]]


def findings_of(observation: Observation) -> tuple[list[Finding], dict[str, str]]:
    """All findings, the dearest first, and the kinds that this observation cannot tell -> why."""
    unknown = {kind: why for kind, check in CHECKS.items() if (why := check.unknown(observation))}
    found = [one for kind, check in CHECKS.items() if kind not in unknown for one in check.find(observation)]
    return sorted(found, key=lambda one: (-one.share, one.kind, one.file or "", one.line or 0)), unknown


def _synchronizations(seen: Observation) -> list[Finding]:
    where = (
        "on an accelerator, the program waits there until the device has done all its work"
        if seen.device != "cpu"
        else "this run is on the CPU, where nothing is in flight; on a GPU the same line waits for all its work"
    )
    remedy = "keep it as a tensor (total += loss.detach()), and read it every 50 steps or at the end"
    return [
        _of_call(seen, call, f"{_how_often(seen, call)}; {where}", remedy)
        for call in _of_kind(seen, ["synchronization"])
    ]


def _prints(seen: Observation) -> list[Finding]:
    remedy = "print a number, and not in each step: if step % 50 == 0: print(loss.item())"
    return [
        _of_call(seen, call, f"{_how_often(seen, call)}; each formats the tensor, reading it back", remedy)
        for call in _of_kind(seen, ["print"])
    ]


def _constants(seen: Observation) -> list[Finding]:
    return [
        _of_call(
            seen,
            call,
            f"{_how_often(seen, call)}, of shape {call.detail}, with the same values each time",
            "make it once and keep it: self.register_buffer(name, tensor, persistent=False)",
        )
        for call in _of_kind(seen, ["constant"])
        if call.steps > 1
    ]


def _norms(seen: Observation) -> list[Finding]:
    return [
        _of_call(
            seen,
            call,
            f"{_how_often(seen, call)}, each of one parameter or gradient",
            "take all of them at once: torch.nn.utils.clip_grad_norm_(model.parameters(), ...) returns the norm",
        )
        for call in _of_kind(seen, ["norm"])
        if call.count >= _MANY * seen.located
    ]


def _waits(seen: Observation) -> list[Finding]:
    found = []
    for loader in seen.loaders:
        share = loader.seconds / sum(seen.timed)
        if share < _MEDIUM:  # handing out a batch takes some microseconds, whatever is done about it
            continue
        by = f"{loader.workers} workers" if loader.workers else "no worker: this process loads"
        evidence = f"{_milliseconds(loader.seconds / loader.batches)} a batch of {loader.dataset}; {by}"
        remedy = (
            "make a row cheaper, or prepare rows beforehand (datasets.map); more workers if there are idle cores"
            if loader.workers
            else "load beside the training: DataLoader(..., num_workers=2, persistent_workers=True), "
            "dataloader_num_workers=2 in TrainingArguments; or prepare rows beforehand (datasets.map)"
        )
        found.append(_finding("data loading", loader.place, share, evidence, remedy))
    return found


def _recompilations(seen: Observation) -> list[Finding]:
    return [
        _finding(
            "recompilation",
            one.place,
            one.seconds / sum(seen.timed),
            f"compiled {one.count} times in {len(seen.timed)} steps behind the warm-up, {one.seconds:.2f} s"
            + (f"; a reason: {one.reason}" if one.reason else ""),
            "keep what the reason names the same: pad to few lengths, pass tensors instead of Python numbers, or "
            "torch.compile(..., dynamic=True)",
        )
        for one in seen.compilations
    ]


def _padding(seen: Observation) -> list[Finding]:
    assert seen.contents is not None
    assert seen.contents.tokens is not None
    assert seen.contents.padding is not None
    share = seen.contents.padding / seen.contents.tokens
    place = seen.loaders[0].place if seen.loaders else None
    passes = (seen.stages["forward"] + seen.stages["backward"]) / sum(seen.stages.values())
    if not share:
        return []
    return [
        _finding(
            "padding",
            place,
            share * passes,
            f"{share:.1%} of the tokens in {seen.contents.steps} steps are padding; forward and backward, which work "
            f"on them too, are {passes:.1%} of a step",
            "put rows of like length into one batch (train_sampling_strategy='group_by_length'), pad to the longest "
            "of the batch and not to max_length, or pack",
        )
    ]


def _of_kind(seen: Observation, kinds: Iterable[CallKind]) -> list[Call]:
    return [call for call in seen.calls if call.kind in kinds]


def _of_call(seen: Observation, call: Call, evidence: str, remedy: str) -> Finding:
    share = call.seconds / median(seen.timed)
    via = f", in {call.place.through}" if call.place.through else ""
    return _finding(_NAMES[call.kind], call.place, share, evidence + via, remedy)


_NAMES: dict[CallKind, str] = {
    "synchronization": "synchronization",
    "print": "print",
    "constant": "constant tensor",
    "norm": "norms one by one",
}


def _finding(kind: str, place: Place | None, share: float, evidence: str, remedy: str) -> Finding:
    file, line = (place.file, place.line) if place else (None, None)
    return Finding(kind, file, line, min(share, 1.0), evidence, remedy)


def _how_often(seen: Observation, call: Call) -> str:
    times = call.count / seen.located
    return f"{call.what}, {times:.3g} a step, {_milliseconds(call.seconds)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _timed(seen: Observation) -> str | None:
    return None if seen.timed else "no step behind the warm-up was seen"


def _located(seen: Observation) -> str | None:
    if reason := _timed(seen):
        return reason
    return None if seen.located else seen.missing.get("calls", "the run ended before lines were looked for")


def _located_twice(seen: Observation) -> str | None:
    return _located(seen) or (None if seen.located > 1 else "it takes two steps to see a tensor made again")


def _loaded(seen: Observation) -> str | None:
    return _timed(seen) or (None if seen.loaders else "no torch DataLoader was used in a step")


def _padded(seen: Observation) -> str | None:
    if reason := _timed(seen):
        return reason
    known = seen.contents is not None and seen.contents.tokens and seen.contents.padding is not None
    return None if known else "no batch came with input_ids and an attention_mask"


CHECKS: dict[str, Check] = {
    "synchronization": Check("Python waits for a value on the device", _located, _synchronizations),
    "print": Check("a tensor is formatted as text", _located, _prints),
    "constant tensor": Check("a line makes the same tensor in each step", _located_twice, _constants),
    "norms one by one": Check("norms of parameters or gradients in a Python loop", _located, _norms),
    "data loading": Check("the step waits for the data loader", _loaded, _waits),
    "recompilation": Check("torch.compile compiles behind the warm-up", _timed, _recompilations),
    "padding": Check("tokens that are padding", _padded, _padding),
}
