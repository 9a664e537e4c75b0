"""Run a 2:4 checkpoint on torch's sparse products: are the predictions the same, and how long does a pass take?

Needs an NVIDIA GPU of compute capability 8.0 or later. Every Linear whose weight is 2:4 becomes a semi-structured
tensor; the dense model and this one take turns.

usage: python examples/semi_structured.py CHECKPOINT [--tokens 512 4096] [--compile] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.sparse import to_sparse_semi_structured
from transformers import AutoModelForCausalLM, PreTrainedModel

from gradprobe_hf.report.build import versions

ROUNDS, WARMUP = 21, 5
STEP = 64  # rows and columns of which torch's kernels take a multiple, in half precision


def is_two_of_four(weight: Tensor) -> bool:
    """Whether its shape is one that kernels take, and no group of four inputs keeps more than two weights."""
    rows, columns = weight.shape
    return not (rows % STEP or columns % STEP) and bool(weight.unflatten(1, (-1, 4)).count_nonzero(-1).le(2).all())


def converted(model: PreTrainedModel) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Exchange the weights that are 2:4; one of each shape comes back, dense and sparse. `model` changes in place."""
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear) and is_two_of_four(module.weight):
            dense = module.weight.detach()
            sparse = to_sparse_semi_structured(dense)
            module.weight = nn.Parameter(sparse, requires_grad=False)
            found.setdefault((dense.shape[0], dense.shape[1]), (dense, sparse))
    return found


def seconds(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median time of each on the GPU; they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(WARMUP + ROUNDS):
        for name, work in works.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            if number >= WARMUP:
                taken[name].append(first.elapsed_time(last) / 1000)
    return {name: median(values) for name, values in taken.items()}


@torch.no_grad()
def measured(checkpoint: str, tokens: int, compiled: bool) -> dict[str, Any]:
    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).cuda().eval()

    dense, sparse = load(), load()
    matrices = converted(sparse)
    if not matrices:
        sys.exit(f"{checkpoint}: no matrix is 2:4 with rows and inputs that are multiples of {STEP}.")
    ids = torch.randint(dense.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    expected, found = (model.base_model(ids).last_hidden_state.float() for model in (dense, sparse))
    forward = {"dense": dense.base_model, "sparse": sparse.base_model}
    if compiled:
        forward = {name: torch.compile(model) for name, model in forward.items()}
    passes = seconds({name: partial(model, ids) for name, model in forward.items()})
    products = []
    for (rows, columns), pair in matrices.items():
        inputs = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
        taken = seconds({name: partial(linear, inputs, w) for name, w in zip(passes, pair, strict=True)})
        products.append({"shape": [rows, columns], **_with_speedup(taken)})
    return {
        "tokens": tokens,
        "compiled": compiled,
        "difference": float((found - expected).norm() / expected.norm()),
        "pass": _with_speedup(passes),
        "products": products,
    }


def _with_speedup(taken: dict[str, float]) -> dict[str, float]:
    return {**taken, "speedup": taken["dense"] / taken["sparse"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--compile", action="store_true", help="both models")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        sys.exit("semi_structured.py: needs an NVIDIA GPU of compute capability 8.0 or later, and found none.")
    made = []
    for tokens in args.tokens:
        made.append(measured(args.checkpoint, tokens, args.compile))
        whole = made[-1]["pass"]
        print(
            f"{tokens} tokens: {1000 * whole['dense']:.2f} ms dense, {1000 * whole['sparse']:.2f} ms sparse, "
            f"{whole['speedup']:.2f} x; hidden states differ by {made[-1]['difference']:.1e}"
        )
        for product in made[-1]["products"]:
            print(f"  product with {product['shape']}: {product['speedup']:.2f} x")
    if args.json:
        about = {"model": Path(args.checkpoint).name, "device": torch.cuda.get_device_name(), "versions": versions()}
        args.json.write_text(json.dumps({**about, "rows": made}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
