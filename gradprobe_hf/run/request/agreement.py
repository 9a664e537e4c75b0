"""Agreement: every process made the same call. Else some would wait for the others in a collective, for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.model.fingerprint import weights_fingerprint
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.runtime.option_checks import function_name
from gradprobe_hf.runtime.processes import PATIENCE, Processes, join_processes


def check_same_call(options: Mapping[str, Any], **given: Any) -> None:
    """Raise ValueError where processes were given other options. It comes before every other collective.

    Args:
        options: of the configuration.
        given: arguments of which it counts whether they are given at all: folders, whose names may differ by machine.
            Of a function its name counts.
    """
    mine = dict(options) | {name: _told(value) for name, value in given.items()}
    calls = join_processes(PATIENCE).gather(mine)
    if not all(isinstance(call, Mapping) for call in calls):  # something else that another one tells
        raise ValueError(
            "the processes are not at the same call: one of them has gone on to another. Start them again."
        )
    by_rank = {
        name: [call.get(name) for call in calls] for name in dict.fromkeys(key for call in calls for key in call)
    }
    differing = {name: values for name, values in by_rank.items() if any(value != values[0] for value in values)}
    if differing:
        listed = "; ".join(f"{name} is {', '.join(map(str, values))}" for name, values in differing.items())
        raise ValueError(
            f"the processes were given different options by rank ({listed}). Make the same call in every process: the "
            "main one alone writes, in any case."
        )


def _told(value: Any) -> str:
    return str(function_name(value)) if callable(value) else "given" if value else "not given"


def check_same_models(processes: Processes, **models: PreTrainedModel) -> None:
    """Raise ValueError where the weights differ, as far as some rows of each tell.

    Of sharded weights every process holds others; offloaded ones are read for it whole, and masks that differ tell too.
    """
    for what, model in models.items():
        if processes.count == 1 or is_sharded(model) or is_offloaded(model):
            continue
        if len(set(processes.gather(weights_fingerprint(model)))) > 1:
            raise ValueError(
                f"the processes hold different weights ({what}): load or make the same model in each, with the same "
                "seed where it is initialised."
            )


def check_same_batches(processes: Processes, **fingerprints: str) -> None:
    """Raise ValueError where processes were given different batches: each takes its share of what it holds itself.

    What a loader has shared out already would be shared out again, and the rest left out of the sums in silence.

    Args:
        fingerprints: of the batches of each argument.
    """
    for what, fingerprint in fingerprints.items():
        if len(set(processes.gather(fingerprint))) > 1:
            raise ValueError(
                f"the processes were given different batches ({what}): every process takes its own share of them, so "
                "give all of them to each, not shared out by a DistributedSampler or accelerator.prepare."
            )
