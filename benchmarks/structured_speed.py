"""How much faster and smaller shapes are: the same model without channels, heads or blocks, beside the dense one.

What goes does not matter here, only how much: it is the first units and blocks, cut out as `prune_pretrained` writes
them. `bench_pretrained` measures all of them, in turns.

    make bench-structured-speed      # SmolLM2-135M; benchmarks/results/structured_speed.json

usage: python -m benchmarks.structured_speed --model DIR [--shapes ffn=640 blocks=8 ...] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from gradprobe_hf import bench_pretrained
from gradprobe_hf.checkpoint.smaller import save_smaller
from gradprobe_hf.cli.tables.bench import print_bench
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.shapes.structured import packed
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import shape_words

RESULTS = Path(__file__).parent / "results"
# Of SmolLM2-135M each takes about 30% of the parameters of the blocks; the last one, 30 blocks to 22, a little less.
SHAPES = ("ffn=640", "ffn=512,kv_groups=1", "ffn=384,blocks=4", "blocks=9", "blocks=8")
LINES = {  # measurement -> title, of the dense model, of the others
    "parameters": ("parameters", lambda value: f"{value / 1e6:,.1f} M"),
    "file_bytes": ("file", lambda value: f"{value / 1e6:,.0f} MB"),
    "peak_memory_bytes": ("peak memory", lambda value: f"{value / 1e6:,.0f} MB"),
    "prefill_seconds": ("time to read the prompt", lambda value: f"{1000 * value['median']:,.0f} ms"),
    "first_token_seconds": ("time to the first token", lambda value: f"{1000 * value['median']:,.0f} ms"),
    "tokens_per_second": ("tokens per second", lambda value: f"{value['median']:.1f}"),
}


def amounts_of(shape: str) -> dict[str, int]:
    """
    >>> amounts_of("ffn=384,blocks=4")
    {'ffn': 384, 'blocks': 4}
    """
    return {name: int(count) for name, _, count in (one.partition("=") for one in shape.split(","))}


def cut(model_name: str, dtype: str, shapes: Sequence[str], folder: Path) -> list[Path]:
    """A checkpoint of the model in this dtype, whatever its own is, and one of each shape."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype)
    targets, found = find_targets(model), [folder / Path(model_name).name]
    model.save_pretrained(found[0])
    for shape in shapes:
        removal = Removal.example(Plan.of(model, targets, amounts_of(shape)))
        found.append(folder / shape)
        found[-1].mkdir()
        with applied(model, targets, packed(removal, targets), keep=False):
            save_smaller(found[-1], model, removal)
    return found


def speed_of_shapes(results: Mapping[str, Any]) -> str:
    """A row for each shape: what it takes, and the speed, as times that of the dense model."""
    dense, *others = results["rows"]
    lines = [
        f"| without | {' | '.join(title for title, _ in LINES.values())} |",
        "|---|" + "---:|" * len(LINES),
        f"| nothing | {' | '.join(shown(dense[name]) for name, (_, shown) in LINES.items())} |",
    ]
    for row in others:
        what = shape_words(amounts_of(Path(row["model"]).name))
        ratios = [f"{row['ratios'][name]:.2f} x" for name in LINES]
        lines.append(f"| {what} | {' | '.join(ratios)} |")
    note = (
        f"{Path(dense['model']).name}, {dense['dtype']}, {results['device']}, {results['threads']} threads; "
        f"{results['prompt_length']} tokens are read and {results['new_tokens']} written, one text at a time. "
        f"Ratios to the dense model are medians of {results['repeats']} rounds in which all take turns. "
        "`make bench-structured-speed`."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=RESULTS / "structured_speed.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = cut(args.model, args.dtype, args.shapes, Path(folder))
        found = bench_pretrained(
            made,
            prompt_length=args.prompt_length,
            new_tokens=args.new_tokens,
            repeats=args.repeats,
            dtype=args.dtype,
        )
    results = found.to_dict()
    for row in results["rows"]:
        row["model"] = Path(row["model"]).name  # the folders are gone, and nobody else has them
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_bench(found)


if __name__ == "__main__":
    main()
