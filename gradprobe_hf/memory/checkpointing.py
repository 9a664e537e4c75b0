"""Checkpointing: whether blocks are recomputed in backward, and why."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.estimation.passes import activation_bytes
from gradprobe_hf.memory.measured_passes import SHARE, MeasuredPass, promised_bytes
from gradprobe_hf.model.parameters import input_device, is_offloaded
from gradprobe_hf.model.passes.patches import checkpointed_layers

ACTIVATIONS_SHARE = 0.6  # of free memory: the rest is for temporaries, and for an estimate that is off


def choose_checkpointing(
    model: PreTrainedModel,
    config: GradProbeConfig,
    rows: int,
    length: int,
    measured: Sequence[MeasuredPass] = (),
    held: int = 0,
) -> tuple[bool, str]:
    """Whether to recompute blocks, and why.

    Args:
        rows, length: sequences in a batch, tokens in a sequence.
        measured: passes of this run; without any an estimate decides.
        held: bytes that are free now, and will not be: those of the statistics.

    Raises:
        ValueError: it was asked for, and no layer of the model can be recomputed.
    """
    layers = checkpointed_layers(model)
    if config.checkpointing is False:
        return False, "off, as asked"
    if not layers:
        reason = f"{type(model).__name__} has no layer that transformers can checkpoint (GradientCheckpointingLayer)"
        if config.checkpointing is True:
            raise ValueError(f"checkpointing=True: {reason}. Use checkpointing=False, and a smaller batch_size.")
        return False, f"off: {reason}"
    if config.checkpointing is True:
        return True, "on, as asked"
    free = max(0, available_bytes(input_device(model)) - held)
    needed, share, about = promised_bytes(measured, rows), SHARE, "by measured passes"
    if needed is None:
        needed = activation_bytes(model, rows, length, checkpointed=False)
        share, about = ACTIVATIONS_SHARE, "about"
    if needed is None:
        return True, "on: what activations would take cannot be told for this architecture"
    shape = f"{rows} x {length} tokens" if length > 1 else f"{rows} rows"  # of images, say
    sizes = f"activations of {shape} take {about} {_gb(needed)}, and {_gb(free)} are free"
    if needed > share * free:
        return True, f"on: {sizes}"
    if is_offloaded(model):
        return True, f"on: the model is offloaded, and blocks are kept out of memory with their weights ({sizes})"
    return False, f"off: {sizes}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"
