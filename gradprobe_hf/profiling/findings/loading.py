"""Batches: waiting for them, and what is in them for nothing."""

from __future__ import annotations

from gradprobe_hf.profiling.findings.finding import MEDIUM, Check, Finding, finding, milliseconds, timed
from gradprobe_hf.profiling.observing.observation import Observation


def _waits(seen: Observation) -> list[Finding]:
    found = []
    for loader in seen.loaders:
        share = loader.seconds / sum(seen.timed)
        if share < MEDIUM:  # handing out a batch takes some microseconds, whatever is done about it
            continue
        by = "no worker: this process loads" if loader.workers == 0 else f"{loader.workers or 'some'} workers"
        evidence = f"{milliseconds(loader.seconds / loader.batches)} a batch of {loader.dataset}; {by}"
        if restarts := loader.workers != 0 and loader.starting > loader.seconds / 2:
            evidence += (
                f", and {loader.starting / loader.seconds:.0%} of it is workers that start and end with an epoch"
            )
        found.append(finding("data loading", loader.place, share, evidence, _REMEDIES[restarts, loader.workers == 0]))
    return found


# By whether the time goes into workers that start anew, and whether there are none.
_REMEDIES = {
    (True, False): "keep them: one DataLoader for all epochs, with persistent_workers=True "
    "(dataloader_persistent_workers=True in TrainingArguments); or make a row cheaper",
    (False, False): "make a row cheaper, or prepare rows beforehand (datasets.map); more workers if there are idle "
    "cores",
    (False, True): "load beside the training: DataLoader(..., num_workers=2, persistent_workers=True), "
    "dataloader_num_workers=2 in TrainingArguments; or prepare rows beforehand (datasets.map)",
}


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
        finding(
            "padding",
            place,
            share * passes,
            f"{share:.1%} of the tokens in {seen.contents.steps} steps are padding; forward and backward, which work "
            f"on them too, are {passes:.1%} of a step",
            "put rows of like length into one batch (train_sampling_strategy='group_by_length'), pad to the longest "
            "of the batch and not to max_length, or pack",
        )
    ]


def _loaded(seen: Observation) -> str | None:
    return timed(seen) or (None if seen.loaders else "no torch DataLoader was used in a step")


def _padded(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    known = seen.contents is not None and seen.contents.tokens and seen.contents.padding is not None
    return None if known else "no batch came with input_ids and an attention_mask"


LOADING = {
    "data loading": Check("the step waits for the data loader", _loaded, _waits),
    "padding": Check("tokens that are padding", _padded, _padding),
}
