"""Squared gradients of a language model, layer by layer, as it is often written; and what would be faster.

    python examples/slow_probing.py
    python examples/slow_probing.py --mended windows checkpointing

For each layer all others are frozen, and the text is gone through again, one window at a time, with gradient
checkpointing, and each sum is read back. The report says which of that is waste. There is no optimizer: the loop says
itself where a step ends.

`benchmarks/profiling.py` mends one at a time and measures what that gains. Freezing is none of the faults: it saves the
gradients of the other layers' weights, and `unfrozen` makes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gradprobe_hf.profiling import Schedule, profiled

VOCABULARY, LENGTH, WINDOWS, LAYERS = 512, 64, 8, 4
CHANGES = ("windows", "checkpointing", "sums", "pass", "unfrozen")


def new_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)).train()


def probe(model: PreTrainedModel, changes: Collection[str]) -> Iterator[int]:
    """Yields, of each step, for how many windows it has the gradients of a layer: windows times layers.

    changes: `windows`: four at a time; `checkpointing`: none; `sums`: kept where they are made; `pass`: one for all
        layers; `unfrozen`: gradients of all layers, of which one is used.
    """
    if "checkpointing" not in changes:
        model.gradient_checkpointing_enable()
    rows = 4 if "windows" in changes else 1
    text: Any = torch.randint(VOCABULARY, (WINDOWS, LENGTH))
    layers = list(model.model.layers)
    sums: dict[int, object] = {}
    while True:
        for number in range(1 if "pass" in changes else LAYERS):
            probed = layers if "pass" in changes else [layers[number]]
            model.requires_grad_("unfrozen" in changes)
            for layer in probed:
                layer.requires_grad_(True)
            for ids in DataLoader(text, batch_size=rows):
                model(input_ids=ids, labels=ids).loss.backward()
                for parameter in (one for layer in probed for one in layer.parameters()):
                    squares = parameter.grad.square().sum()
                    before = sums.get(id(parameter), 0.0)
                    sums[id(parameter)] = before + (squares if "sums" in changes else squares.item())
                model.zero_grad()
                yield rows * len(probed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mended", nargs="*", default=[], choices=CHANGES)
    made = new_model()
    with profiled(made, schedule=Schedule(3, 10, 2, 4)) as profiler:
        for _ in probe(made, parser.parse_args().mended):
            profiler.step()
            if profiler.done:
                break
    print(profiler.report().markdown())
