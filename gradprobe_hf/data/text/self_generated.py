"""`"self"`: the model writes its own calibration text.

Source: Liu et al. 2023, LLM-QAT (arXiv:2305.17888), section 2.1: text sampled from a model has the distribution it was
trained on, so no dataset is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from gradprobe_hf.model.config_names import of_each_block, text_attribute
from gradprobe_hf.model.families import cache_name, is_causal
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.decoding import growing_cache, plain_generation
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.runtime.processes import Processes

# Windows in one batch of generation: what reads every weight for one token may as well write many; 128 are no faster.
WRITTEN_AT_ONCE = 64
WITH_CACHE = {"use_cache": True, "cache_implementation": None, "disable_compile": True}
CACHE_BYTES = 2 * 2**30  # that keys and values of one batch may take


@torch.no_grad()
def own_text(
    model: PreTrainedModel,
    samples: int,
    length: int,
    seed: int,
    *,
    begins: Sequence[int] = (),
    processes: Processes | None = None,
    progress: bool = True,
) -> Tensor:
    """Sample token ids `[samples, length]` from the model at temperature 1, from its first token on.

    Every window has random numbers of its own: how many are written at once, and by how many processes, changes the
    text by rounding at most. All processes return the same text. The caller's random state is not touched.

    Args:
        begins: what each window begins with; by default the model's BOS, or a random token where it has none.

    Raises:
        ValueError: not a causal language model.
    """
    if not is_causal(model):
        raise ValueError(
            f"'self' needs a causal language model, which can write text, got {type(model).__name__}: give a text or "
            "batches (calibration, --calibration)."
        )
    processes = processes or Processes()
    if is_sharded(model):  # all have to take part in every pass
        processes = Processes()
    generator = torch.Generator().manual_seed(seed)
    first = _first_tokens(model, samples, begins[: length - 1], generator)
    chances = torch.rand(samples, length, generator=generator)
    own = torch.tensor(processes.mine(range(samples)), dtype=torch.long)
    # Of a few windows a process may have none.
    parts = own.split(written_at_once(model, length)) if len(own) else ()
    ids = torch.zeros(samples, length, dtype=torch.long)
    steps = len(parts) * (length - first.shape[1])
    with (
        eval_mode(model),
        upcast_products(model),
        tqdm(total=steps, desc="the model writes its own text", unit="token", disable=not progress, leave=False) as bar,
    ):
        for part in parts:
            ids[part] = _written(model, first[part], _Sampler(chances[part], bar.update), length)
    return processes.sum_(ids)


@dataclass(frozen=True)
class KeptText:
    """A file that keeps the text that a model has written, so that a run that is resumed goes on with the same.

    Attributes:
        path: of this process; the others have files of their own.
        model: what tells this model from others.
    """

    path: Path
    model: str
    processes: Processes

    def read_or_write(self, described: Mapping[str, Any], write: Callable[[], Tensor]) -> Tensor:
        """The text that is kept, if all processes have it, or that is written now. A collective.

        Args:
            described: in JSON types, what decides about the text beside the model.
        """
        key = json.dumps({**described, "model": self.model}, sort_keys=True)
        kept = self.processes.in_all(partial(self._read, key))  # each has a file of its own, and one may be damaged
        if bool(self.processes.min_(torch.tensor(int(kept is not None)))) and kept is not None:
            return kept
        ids = write()
        self.processes.in_all(partial(self._keep, ids, key))
        return ids

    def _keep(self, ids: Tensor, key: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        try:
            save_file({"ids": ids}, scratch, metadata={"of": key})
        except SafetensorError as error:  # what a full disk is to safetensors
            scratch.unlink(missing_ok=True)
            raise OSError(f"the text that the model wrote cannot be kept in {self.path.parent}: {error}") from error
        scratch.replace(self.path)  # whole or not at all

    def _read(self, key: str) -> Tensor | None:
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_tensor("ids") if file.metadata() == {"of": key} else None
        except SafetensorError as error:
            raise ValueError(
                f"the text that a run was killed with is damaged: {self.path} ({error}). Delete it, and the model "
                "writes it again."
            ) from error


class _Sampler(LogitsProcessor):
    """Samples by inverting the distribution at a number of the window's own; what is greedy then takes this token.

    Args:
        chances: `[windows, tokens]` in [0, 1).
        on_step: called with 1 at each token.
    """

    def __init__(self, chances: Tensor, on_step: Callable[[int], Any]) -> None:
        self.chances, self.on_step = chances, on_step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.on_step(1)
        upto = scores.float().softmax(-1).cumsum(-1)
        chance = self.chances[:, input_ids.shape[1], None].to(upto.device)
        # `right=True`: the first token whose sum is greater, so that one of probability 0 is never taken.
        token = torch.searchsorted(upto, chance * upto[:, -1:], right=True).clamp_(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0)


def _written(model: PreTrainedModel, first: Tensor, sampler: _Sampler, length: int) -> Tensor:
    """`[windows, length]` of windows that begin with `first`."""
    device = input_device(model)
    first = first.to(device)
    new = length - first.shape[1]
    name, kept = cache_name(model), {}
    if name is not None and device.type == "cpu" and not is_sharded(model):
        cache = growing_cache(model, length)
        kept = {} if cache is None else {name: cache, **WITH_CACHE}
    with plain_generation(model):
        written = model.generate(
            first,
            attention_mask=torch.ones_like(first),
            logits_processor=LogitsProcessorList([sampler]),
            min_new_tokens=new,  # an end-of-text token would leave a window that is not full
            max_new_tokens=new,
            pad_token_id=0,
            **kept,
        )
    return written.cpu()


def written_at_once(model: PreTrainedModel, length: int) -> int:
    """Windows in one batch, so that their keys and values fit in `CACHE_BYTES`."""
    return max(1, min(WRITTEN_AT_ONCE, CACHE_BYTES // max(window_bytes(model, length), 1)))


def window_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of the keys and values of a window."""
    config = model.config
    heads = of_each_block(config, "num_attention_heads", 1)
    share = [text_attribute(config, "hidden_size", 1) // count for count in heads]
    widths = [width or rest for width, rest in zip(of_each_block(config, "head_dim"), share, strict=True)]
    kept = [own or count for own, count in zip(of_each_block(config, "num_key_value_heads"), heads, strict=True)]
    numbers = sum(count * width for count, width in zip(kept, widths, strict=True))
    return int(2 * numbers * length * model.dtype.itemsize)


def _first_tokens(model: PreTrainedModel, count: int, begins: Sequence[int], generator: torch.Generator) -> Tensor:
    """`[count, tokens]`: what the tokenizer begins a text with, the model's BOS, or a random token each."""
    beginning = model.generation_config.bos_token_id if model.generation_config else None
    if begins:
        return torch.tensor(begins, dtype=torch.long).expand(count, -1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # A configuration of few tokens may have kept the BOS of its family's own vocabulary.
    if beginning is None or not 0 <= beginning < vocabulary:
        return torch.randint(vocabulary, (count, 1), generator=generator)
    return torch.full((count, 1), beginning)
