"""Keep the mask: pruned weights are exactly zero after every step, and their gradients count nowhere.

An optimizer forgets zeros in three ways: the gradient of a pruned weight, momentum of before, and rounding of a master
copy. Decoupled weight decay leaves a zero alone. Masking the weight after the step undoes all three; masking the
gradient too, before it is clipped, keeps it out of the norm, and out of the moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gradprobe_hf.training.callback import StepCallback, attached, logger
from gradprobe_hf.training.keeper import MaskKeeper, MaskSource, load_masks, masks_of


class SparsityCallback(StepCallback):
    """Keeps pruned weights zero while a model trains.

    Args:
        masks: matrix name -> bool `[out, in]`, True = pruned; a `PruneResult`; or `"from-zeros"`, the zeros that the
            model has when training begins.

    Attributes:
        keeper: the masks, once training has begun; they take an eighth of a byte per weight.

    Example:
        `Trainer(model, args, train_dataset=..., callbacks=[SparsityCallback("from-zeros")]).train()`
    """

    decides_zeros = True

    def __init__(self, masks: MaskSource = "from-zeros") -> None:
        super().__init__()
        self.source = masks
        self.keeper: MaskKeeper | None = None

    def begin(self) -> None:
        """
        Raises:
            ValueError: masks of another model; no zeros; or LoRA adapters, under which the weights do not train.
        """
        check_not_adapted(self.model)
        self.keeper = MaskKeeper(self.model, *masks_of(self.model, self.source))
        self.keeper.mask_weights()

    def watch(self) -> list[RemovableHandle]:
        return self.keeper.watch_gradients() if self.keeper else []

    def after_step(self) -> None:
        if self.keeper:
            self.keeper.mask_weights()

    def end(self) -> None:
        self.after_step()  # load_best_model_at_end: the best checkpoint may be older than this callback

    def save(self, folder: Path) -> None:
        if self.keeper:
            self.keeper.save(folder)

    def restore(self, folder: Path) -> None:
        """With `"from-zeros"`, the masks of the run that saved: a kept weight may have become zero by rounding."""
        if self.source != "from-zeros":
            return
        masks = load_masks(self.model, folder)
        if masks is None:
            logger.warning("%s has no masks of this callback: the zeros of its weights are kept", folder)
            return
        assert self.keeper is not None, "training has begun"
        self.keeper = MaskKeeper(self.model, tuple(self.keeper.targets.values()), masks)


@contextmanager
def keep_sparsity(model: nn.Module, optimizer: Any, masks: MaskSource = "from-zeros") -> Iterator[MaskKeeper]:
    """Keep pruned weights zero in a training loop of one's own, for the body of the `with`.

    Args:
        optimizer: torch's, or Accelerate's; its `step` masks the weights, and each backward pass the gradients.
        masks: as for `SparsityCallback`.
    """
    callback = SparsityCallback(masks)
    with attached(callback, model, optimizer):
        assert callback.keeper is not None, "training has begun"
        yield callback.keeper


def check_not_adapted(model: nn.Module) -> None:
    """
    Raises:
        ValueError: the model has adapters of PEFT.
    """
    if hasattr(model, "peft_config"):
        raise ValueError(
            "the weights of a model with PEFT adapters do not train, so their zeros stay. Train without this callback "
            "and merge with gradprobe_hf.training.merge_with_masks; masked_adapters keeps the product of the adapters "
            "inside of the mask while it trains."
        )
