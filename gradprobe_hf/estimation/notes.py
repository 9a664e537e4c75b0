"""Notes: what a reader of an estimate has to know about its figures."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.footprint import Placement
from gradprobe_hf.estimation.passes import PassCost
from gradprobe_hf.estimation.sizes import BatchSizes, Sizes
from gradprobe_hf.model.families import is_in_tower
from gradprobe_hf.model.targets import Target, go_alone, is_routed


def notes_on(
    model: PreTrainedModel,
    config: GradProbeConfig,
    targets: Sequence[Target],
    cost: PassCost,
    batch: BatchSizes,
    sizes: Sizes,
    placements: Sequence[Placement],
) -> tuple[str, ...]:
    """Notes on an estimate; `cost` and `batch` are those without recomputation."""
    notes = []
    if not cost.simulated:
        notes.append("activations are a rough formula's: the model could not be run without data here")
    if config.batch_size == "auto":
        notes.append("batch_size='auto': counted for batches of one")
    if config.evaluation_protocol == "paper":
        notes.append("evaluation_protocol='paper': it reads the whole test split, and is not counted")
    if config.recovery_steps:
        notes.append("recovery_steps: counted to the last step, on full windows; offloaded weights cannot be trained")
    if is_routed(targets):
        notes.append("experts mix the tokens of a batch: one sequence at a time, tokens shared evenly by the experts")
    elif go_alone(model, targets):
        notes.append("the sequences of a batch cannot be told apart in all matrices: one at a time")
    if 2 * batch.loss > batch.peak > 0:
        notes.append("the logits and their loss are the larger part of a batch; a smaller batch size shrinks them")
    unseen = [target for target in targets if any(is_in_tower(site.module) for site in target.sites)]
    if unseen and model.main_input_name == "input_ids":
        notes.append(
            "passes are counted of text alone: an image or a recording adds those of its own part and its tokens; on "
            f"text alone, {len(unseen)} matrices of that part are left out of the budget"
        )
    if not any(one.fits for one in placements):
        notes.append(_remedy(config, sizes, placements[-1]))
    return tuple(notes)


def _remedy(config: GradProbeConfig, sizes: Sizes, smallest: Placement) -> str:
    """What to try where not even the smallest placement fits."""
    for device, free in smallest.room.items():
        needed = smallest.needed(device)
        if needed <= free:
            continue
        if device == "disk":
            return f"no placement fits: it would write {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        if sizes.accumulators.bytes > free and config.accumulator_device != "disk":
            return "no placement fits: try --accumulator-device disk, --accumulator-dtype int8, or --fisher factored"
        if max(smallest.stages, key=lambda stage: stage.bytes_on(device, needed=True)).name == "recover":
            return (
                f"no placement fits the recovery, which takes {needed / 1e9:.1f} GB: try a shorter --sequence-length, "
                "or leave --recovery-steps out, and recover the checkpoint by adapters (gradprobe recover --lora-r 16)"
            )
    return "no placement fits: try --batch-size 1, a shorter --sequence-length, or another machine"
