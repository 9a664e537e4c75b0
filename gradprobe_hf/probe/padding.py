"""Padding: which tokens of a batch count, and which sequence each of them belongs to.

Modules see a batch as `[sequences, tokens, features]`, or as `[sequences * tokens, features]` in models that flatten
it (OPT). Sequences are told apart by their position alone. A multiple choice is `[sequences, choices, tokens]`, and
modules see `[sequences * choices, tokens, features]`: the tokens of a sequence are those of all its choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.model.families import (
    frame_mask,
    in_decoder,
    is_in_tower,
    merges_attention,
    widened_mask,
    widens_inputs,
)
from gradprobe_hf.model.masks import unpadded
from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target
from gradprobe_hf.tasks.columns import IGNORED


@dataclass(frozen=True)
class BatchLayout:
    """How the tokens of one batch lie in the tensors that modules are called with.

    Attributes:
        sequences: rows of the batch.
        tokens: of each row of `input_ids`; 1 for a batch without them.
        encoder_mask: False at padding of the inputs, bool `[sequences, tokens]`; None: every token counts.
        decoder_mask: the same for the tokens that a decoder is given; of a model without an encoder `encoder_mask`.
        frames: how many frames a model makes of the inputs, or tokens with those that it pads them with -> which of
            them are of no padding, bool `[sequences, frames]`; None: it makes none, or not so many.
        choices: texts of each row, of which one is to be chosen; 1: a row is one text.
    """

    sequences: int
    tokens: int
    encoder_mask: Tensor | None = None
    decoder_mask: Tensor | None = None
    frames: Callable[[int], Tensor | None] | None = None
    choices: int = 1

    @classmethod
    def of(cls, batch: Batch, model: PreTrainedModel) -> BatchLayout:
        """The layout of one batch.

        Raises:
            ValueError: the tokens of encoder and decoder cannot be told apart.
        """
        ids, inputs = batch.get("input_ids"), batch.get("attention_mask")
        choices = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 3 else 1
        encoder_mask = None
        if isinstance(inputs, Tensor) and (inputs.ndim == 2 or (choices > 1 and inputs.ndim == 3)):
            # As transformers reads it: what is not 0 counts. Segments of packed texts are numbered 1, 2, ...
            encoder_mask = (inputs != 0).flatten(1)
        elif isinstance(ids, Tensor) and (seen := unpadded(inputs, ids)) is not None and not bool(seen.all()):
            encoder_mask = seen  # of pairs of tokens
        if encoder_mask is None and isinstance(ids, Tensor) and ids.ndim == 2 and widens_inputs(model):
            encoder_mask = torch.ones_like(ids, dtype=torch.bool)
        # Decoder-only OPT calls its blocks `decoder` too; its tokens are those of `attention_mask`.
        decoder_mask = _decoder_mask(batch, encoder_mask) if model.config.is_encoder_decoder else encoder_mask
        if merges_attention(model) and _are_confused(encoder_mask, decoder_mask):
            raise ValueError(
                f"{type(model).__name__} reads its source and its target with the same maps, and a batch has as many "
                "tokens of both, padded otherwise: they cannot be told apart. Set batch_size=1 (or give batches of one "
                "row)."
            )
        return cls(
            row_count(batch),
            ids.shape[1:].numel() if isinstance(ids, Tensor) and ids.ndim > 1 else 1,
            encoder_mask,
            decoder_mask,
            _frames(model, encoder_mask, of_text=ids is not None),
            choices,
        )

    def by_sequence(self, value: Tensor, features: int, name: str) -> Tensor:
        """`[sequences, tokens, ...]` from whatever shape a module was called with.

        Args:
            features: trailing dimensions that are no tokens: 1, or 0 for the ids that an embedding is called with.
            name: of the target, for the error.

        Raises:
            ValueError: a shape in which sequences cannot be told apart.
        """
        leading = value.shape[: value.ndim - features]
        texts = (self.sequences, self.sequences * self.choices)
        flattened = len(leading) == 1 and leading[0] in (*texts, self.sequences * self.tokens)
        if self.sequences != 1 and not flattened and not (len(leading) >= 2 and leading[0] in texts):
            raise ValueError(
                f"{name} is used on a tensor of shape {tuple(value.shape)}, in which the {self.sequences} sequences of "
                "the batch cannot be told apart; set batch_size=1 (or give batches of one row)."
            )
        return value.reshape(self.sequences, -1, *value.shape[len(leading) :])

    def token_mask(self, site: Site, x: Tensor) -> Tensor | None:
        """False at padding of `x [sequences, tokens, ...]`, bool `[sequences, tokens]`; None: every token counts."""
        in_its_decoder = in_decoder(site.module)
        mask = self.decoder_mask if in_its_decoder else self.encoder_mask
        # Of patches of an image, or frames, there may be as many as there are tokens of text.
        if mask is None or is_in_tower(site.module):
            return None
        if mask.shape != x.shape[:2]:
            # A mask of another shape is not about these tokens. They may be the encoder's, of which a decoder makes
            # keys and values, or frames of speech; or one pooled token a sequence, which counts.
            mask = self.encoder_mask if in_its_decoder else None
            if mask is None or mask.shape != x.shape[:2]:
                mask = self.frames(x.shape[1]) if self.frames is not None else None
        return None if mask is None else mask.to(x.device)

    def unpadded_inputs(self, target: Target, site: Site, inputs: Tensor) -> Tensor:
        """The inputs of a linear map without padding, `[tokens, in]`."""
        x = self.by_sequence(inputs, 1, target.name)
        mask = self.token_mask(site, x)
        return x.flatten(0, 1) if mask is None else x[mask]

    def tokens_of(self, rows: Tensor, target: Target, site: Site, inputs: Tensor) -> Tensor:
        """Which of the tokens of `unpadded_inputs` belong to some sequences, bool `[tokens]`.

        Args:
            rows: bool, `[sequences]`.
        """
        x = self.by_sequence(inputs, 1, target.name)
        mask = self.token_mask(site, x)
        belongs = rows.to(x.device)[:, None].expand(x.shape[:2])
        return belongs.flatten() if mask is None else belongs[mask]

    def input_squares(self, target: Target, site: Site, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x^2 with padding at zero, `[sequences, tokens, in]`; for an embedding the count of each token, `[tokens]`."""
        mask = self.token_mask(site, x)
        if site.kind == "embedding":
            weights = torch.ones_like(x, dtype=dtype) if mask is None else mask.to(dtype)
            counts = torch.zeros(target.shape[0], dtype=dtype, device=x.device)
            return counts.index_add_(0, x.flatten(), weights.flatten())
        x_sq = x.to(dtype).square()
        return x_sq if mask is None else x_sq * mask[..., None]


def _frames(model: PreTrainedModel, mask: Tensor | None, of_text: bool) -> Callable[[int], Tensor | None] | None:
    """What tells which are of no padding where a model makes others of its inputs, or adds some."""
    if mask is None or (of_text and not widens_inputs(model)):
        return None
    # Kept: every map of a batch asks for it.
    return cache(partial(widened_mask if of_text else frame_mask, model, mask))


def _decoder_mask(batch: Batch, encoder_mask: Tensor | None) -> Tensor | None:
    """False at padding of the tokens that the decoder of an encoder-decoder is given; None: every one counts."""
    given, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if isinstance(given, Tensor):
        return given != 0
    if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point():
        # transformers shifts these labels to make the decoder's inputs. Those in front of the last that counts may be a
        # prompt, which is read and not predicted.
        return (labels != IGNORED).flip(-1).cumsum(-1).flip(-1) > 0
    # One label a row: transformers gives the decoder the inputs, shifted by one behind a token that begins them. Of a
    # row without padding the last one falls off, so that there are as many.
    return None if any(name.startswith("decoder_") for name in batch) else encoder_mask


def _are_confused(encoder_mask: Tensor | None, decoder_mask: Tensor | None) -> bool:
    """Whether two masks have one shape, and are not the same."""
    if encoder_mask is None or decoder_mask is None or encoder_mask.shape != decoder_mask.shape:
        return False
    return not torch.equal(encoder_mask, decoder_mask)
