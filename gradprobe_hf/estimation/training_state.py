"""Training state: what the state of a recovery takes of the disk, for the estimate and for the run itself."""

from __future__ import annotations

import math

from gradprobe_hf.config.recovery import RecoveryConfig

_BEST_BYTES, _CHECKPOINT_BYTES = 4, 12  # of each parameter: itself in float32, and AdamW's two moments beside it


def state_bytes(config: RecoveryConfig, parameters: int, *, resumable: bool) -> int:
    """The most that the state of a training takes of the disk; adapters, which are small, not counted.

    Args:
        parameters: how many are trained.
        resumable: whether checkpoints are written.
    """
    if config.lora_r is not None:
        return 0
    if not resumable:
        return 2 * _BEST_BYTES * parameters  # the best state is there until a better one is whole
    # So is an older checkpoint until the next one is. One is written behind a better state, and takes more.
    checkpoints = min(2, math.ceil(config.steps / config.save_steps))
    return (_BEST_BYTES + _CHECKPOINT_BYTES * checkpoints) * parameters
