"""Keep the mask: pruned weights are exactly zero after every step, and their gradients count nowhere.

An optimizer moves a zero in three ways: by its gradient, by momentum from earlier steps, and by rounding from a master
copy. (Decoupled weight decay leaves it alone.) Masking the weight after the step undoes all three. Masking its gradient
before clipping keeps it out of the gradient norm, which scales every other gradient, and out of the moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gradprobe_hf.run.apply import check_whole
from gradprobe_hf.training.callback import StepCallback, attached, logger, parameters_of
from gradprobe_hf.training.keeper import MaskKeeper, MaskSource, check_source, load_masks, resolve_masks


class SparsityCallback(StepCallback):
    """Keeps pruned weights at zero while a model trains.

    Args:
        masks: matrix name -> bool `[out, in]`, True = pruned; a `PruneResult`; or `"from-zeros"`, the weights that are
            zero when training begins, of all weights but vectors: of convolutions and routers too. One of those
            that is nothing but zeros has yet to learn, and trains.

    Attributes:
        keeper: the masks, once training has begun; 0.125 bytes per weight.

    Raises:
        ValueError: when training begins: masks of another model; no zeros; a masked parameter that trains and is in no
            optimizer that was passed; or PEFT adapters, under which the weights do not train (see `merge_with_masks`).
            When a run is resumed: masks in `output_dir` of other weights.

    Example:
        ```python
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[SparsityCallback("from-zeros")])
        trainer.train()
        ```
    """

    decides_zeros = True
    takes_several = True

    def __init__(self, masks: MaskSource = "from-zeros") -> None:
        super().__init__()
        check_source(masks)
        self.source = masks
        self.keeper: MaskKeeper | None = None

    def begin(self) -> None:
        check_not_adapted(self.model)
        check_whole(self.model)
        self.keeper = MaskKeeper(self.model, *resolve_masks(self.model, self.source))
        self.check_optimized(
            (target.parameter for target in self.keeper.targets.values()),
            "Its zeros are lost between two steps of another one: pass all that train the model, keep_sparsity(model, "
            "[one, other]), or freeze what none of them trains (requires_grad_(False)).",
        )
        self.tell_of_rounding(target.parameter for target in self.keeper.targets.values())
        self.keeper.mask_weights()

    def gradient_hooks(self) -> list[RemovableHandle]:
        return self.keeper.gradient_hooks() if self.keeper else []

    def before_step(self) -> None:
        if self.keeper:
            self.keeper.mask_gradients()

    def after_step(self) -> None:
        if self.keeper:  # a step of one optimizer, inside of a backward pass say, leaves the others' weights alone
            several = self.stepped is not None and len(self.optimizers) > 1
            self.keeper.mask_weights(parameters_of(self.stepped) if several else None)

    def end(self) -> None:
        self.after_step()  # load_best_model_at_end may have loaded a checkpoint from before this callback

    def save(self, folder: Path) -> None:
        if self.keeper:
            self.keeper.save(folder)

    def restore(self, folder: Path) -> None:
        """With `"from-zeros"`, go on with the masks that were saved: a kept weight may have become zero by rounding."""
        if self.source != "from-zeros":
            return
        masks = load_masks(self.model, folder)
        if masks is None:
            logger.warning("%s has no masks of this callback: the weights that are zero now are kept at zero", folder)
            return
        assert self.keeper is not None, "training has begun"
        found = self.keeper
        self.keeper = MaskKeeper(self.model, tuple(found.targets.values()), masks)
        self.keeper.check_restored(folder)
        self.keeper.check_all_of(found, folder)


@contextmanager
def keep_sparsity(model: nn.Module, optimizer: Any, masks: MaskSource = "from-zeros") -> Iterator[MaskKeeper]:
    """Keep pruned weights at zero in a training loop of your own, for the body of the `with`.

    Args:
        model: as it trains, wrapped or not.
        optimizer: torch's, or Accelerate's. Its `step` masks the weights, each backward pass the gradients. A list of
            them where each trains a part of the model: `keep_sparsity(model, [muon, adamw])`.
        masks: as for `SparsityCallback`.

    Yields:
        The masks in use.

    Raises:
        ValueError: as `SparsityCallback`.

    Example:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])})
        >>> weight, mask = model["layers"][0].weight, torch.eye(2).bool()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with keep_sparsity(model, optimizer, {"layers.0.weight": mask}):
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> (weight == 0).tolist()
        [[True, False], [False, True]]
    """
    callback = SparsityCallback(masks)
    with attached(callback, model, optimizer):
        assert callback.keeper is not None, "training has begun"
        yield callback.keeper


def check_not_adapted(model: nn.Module) -> None:
    """Refuse a model with PEFT adapters."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            "the weights of a model with PEFT adapters do not train, so their zeros stay. Train without this callback "
            "and merge with gradprobe_hf.training.merge_with_masks; masked_adapters keeps the adapters' product inside "
            "the mask during training."
        )
