"""`"self"`: the model writes its own calibration text.

Source: Liu et al. 2023, LLM-QAT (arXiv:2305.17888), section 2.1: text sampled from a model has the distribution it was
trained on, so no dataset is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.model.families import is_causal
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.patches import eval_mode

WRITTEN_AT_ONCE = 16  # windows in one batch of generation


@torch.no_grad()
def own_text(model: PreTrainedModel, samples: int, length: int, seed: int, progress: bool = True) -> Tensor:
    """Sample token ids `[samples, length]` from the model at temperature 1, from its first token on.

    The caller's random state is restored.

    Raises:
        ValueError: not a causal language model.
    """
    if not is_causal(model):
        raise ValueError(f"'self' needs a causal language model to write text, got {type(model).__name__}.")
    with eval_mode(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        counts = [len(part) for part in torch.arange(samples).split(WRITTEN_AT_ONCE)]
        written = [
            # Plain sampling, whatever the checkpoint's generation config says: options that sharpen or truncate the
            # distribution would calibrate on another one than the model was trained on.
            model.generate(
                start := _first_tokens(model, count),
                attention_mask=torch.ones_like(start),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                min_new_tokens=length - 1,  # an end-of-text token would leave a window that is not full
                max_new_tokens=length - 1,
                pad_token_id=0,
            )
            for count in tqdm(counts, desc="the model writes its own text", disable=not progress, leave=False)
        ]
    return torch.cat(written).cpu()


def _first_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """`[count, 1]`: the beginning-of-text token, or a random token for each sample if the model has none."""
    beginning = model.generation_config.bos_token_id if model.generation_config else None
    if beginning is None:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        return torch.randint(vocabulary, (count, 1)).to(input_device(model))
    return torch.full((count, 1), beginning, device=input_device(model))
