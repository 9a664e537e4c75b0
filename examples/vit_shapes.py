"""Draw pictures of four shapes, train a small ViT to tell them apart, and save both: a vision model to prune, offline.

OUTPUT gets `model/`, with its image processor, and `train.parquet` and `test.parquet`, with columns image and label.
With --json FILE the model is pruned in several ways, too, and what they come to is written there.

usage: python examples/vit_shapes.py OUTPUT [--images 4000] [--steps 600] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pictures
from PIL import ImageDraw
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.report.build import versions

WAYS: tuple[dict[str, Any], ...] = (
    {"sparsity": 0.5},
    {"sparsity": 0.7},
    {"sparsity": 0.7, "preset": "fast"},
    {"sparsity": 0.8},
    {"sparsity": 0.8, "preset": "fast"},
    {"pattern": "2:4"},
    {"sparsity": 0.9, "max_metric_drop": "1%", "metric": "accuracy"},
)
SIZE = 32
CORNERS = {"circle": 60, "triangle": 3, "square": 4, "star": 10}


def picture(shape: str, draw: random.Random) -> Pictures.Image:
    """A shape of a random color, place, size and angle, on noise."""
    noise = bytes(draw.randrange(60) for _ in range(3 * SIZE * SIZE))
    image = Pictures.frombytes("RGB", (SIZE, SIZE), noise)
    radius, turn = draw.uniform(9, 13), draw.uniform(-0.3, 0.3)
    x, y = (draw.uniform(radius, SIZE - radius) for _ in range(2))
    count = CORNERS[shape]
    corners = []
    for corner in range(count):
        reach = radius / 2 if shape == "star" and corner % 2 else radius
        angle = turn + 2 * math.pi * corner / count
        corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    color = tuple(draw.randrange(120, 256) for _ in range(3))
    ImageDraw.Draw(image).polygon(corners, fill=color)
    return image


def pictures(count: int, seed: int) -> Dataset:
    draw, names = random.Random(seed), list(CORNERS)
    labels = [draw.randrange(len(names)) for _ in range(count)]
    rows = {"image": [picture(names[label], draw) for label in labels], "label": labels}
    return Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=names)}))


def trained(model: ViTForImageClassification, processor: ViTImageProcessorPil, rows: Dataset, steps: int) -> None:
    pixels = processor(images=rows["image"][:], return_tensors="pt")["pixel_values"]
    examples = [{"pixel_values": one, "labels": label} for one, label in zip(pixels, rows["label"], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=64,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            use_cpu=not torch.accelerator.is_available(),
            save_strategy="no",
            logging_steps=max(1, steps // 10),
            report_to="none",
            seed=0,
        )
        Trainer(model, options, train_dataset=examples).train()


def measured(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The model pruned in one way, on the images that it was trained on, and measured on the others."""
    result = prune_pretrained(
        folder / "model",
        GradProbeConfig(**options),
        calibration=folder / "train.parquet",
        evaluation=folder / "test.parquet",
    )
    found = result.report.evaluation
    assert found is not None, "there is a text to measure on"
    kinds = {kind: {"loss": found[kind]["loss"], "accuracy": found["metric"][kind]} for kind in ("dense", "pruned")}
    return {"options": options, "sparsity": result.report.sparsity, "samples": found["samples"], **kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path, help="where the figures of pruned models are written")
    args = parser.parse_args()
    if args.output.exists():
        sys.exit(f"{args.output} exists: give another OUTPUT, or remove it.")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    train, test = pictures(args.images, seed=0), pictures(args.images // 4, seed=1)
    names = dict(enumerate(CORNERS))
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=SIZE,
            patch_size=4,
            id2label=names,
            label2id={name: label for label, name in names.items()},
        )
    )
    processor = ViTImageProcessorPil(size={"height": SIZE, "width": SIZE})
    trained(model, processor, train, args.steps)
    args.output.mkdir(parents=True)  # only now: a run that is stopped before leaves nothing in the way of the next
    for saved in (model, processor):
        saved.save_pretrained(args.output / "model")
    train.to_parquet(args.output / "train.parquet")
    test.to_parquet(args.output / "test.parquet")
    if args.json:
        figures = {"images": args.images, "steps": args.steps, "parameters": model.num_parameters()}
        rows = [measured(args.output, options) for options in WAYS]
        args.json.write_text(json.dumps(figures | {"versions": versions(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
