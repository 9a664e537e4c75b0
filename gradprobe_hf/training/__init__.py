"""Training: pruning while a model trains, and keeping a mask through fine-tuning; for `Trainer` and any other loop."""

from gradprobe_hf.training.callback import StepCallback, attached
from gradprobe_hf.training.lora import MergeReport, masked_adapters, merge_with_masks
from gradprobe_hf.training.selective import SelectiveUpdateCallback
from gradprobe_hf.training.sparsity import SparsityCallback, keep_sparsity
from gradprobe_hf.training.spikes import SpikeAwareClip
from gradprobe_hf.training.state_pruning import MaskUpdate, StatePruningCallback

__all__ = [
    "MaskUpdate",
    "MergeReport",
    "SelectiveUpdateCallback",
    "SparsityCallback",
    "SpikeAwareClip",
    "StatePruningCallback",
    "StepCallback",
    "attached",
    "keep_sparsity",
    "masked_adapters",
    "merge_with_masks",
]
