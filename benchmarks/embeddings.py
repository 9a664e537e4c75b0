"""What pruning leaves of an embedding model: its embeddings, and what they are used for.

    make bench-embeddings        # all-MiniLM-L6-v2, C4, SST-2; benchmarks/results/embeddings.json

Calibrated on the beginnings of web documents; on others are measured the cosine of an embedding to the dense one, and
retrieval: of the second halves of all documents the nearest to a first half is to be its own. Sentiment is that of a
ridge regression on the embeddings of SST-2's sentences, made for each model anew. Embeddings are made here by
transformers alone, as the model's files say (the mean of its tokens, normalised). Rows that the file has are not made
again.

usage: python -m benchmarks.embeddings --model DIR --calibration SPEC --evaluation SPEC --sst2 DIR [--rows NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from benchmarks.quality_texts import TextSpec
from benchmarks.resumed_rows import Row, made_rows, row_parser
from gradprobe_hf import GradProbeConfig, prune_pretrained

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"score": "magnitude"},
    "Wanda": {"score": "wanda"},
    "SparseGPT": {"update": "sparsegpt"},
    "SparseGPT, dense_target 0.5": {"update": "sparsegpt", "dense_target": 0.5},
    "preset fast": {"preset": "fast"},
    "preset balanced": {"preset": "balanced"},
    "preset best": {"preset": "best"},
}
COLUMNS: dict[str, dict[str, Any]] = {"50%": {"sparsity": 0.5}, "70%": {"sparsity": 0.7}, "2:4": {"pattern": "2:4"}}
CELLS = {f"{method}, {column}": (method, column) for column in COLUMNS for method in METHODS}
DENSE = "dense"
SHORTEST = 400  # characters of a document that is cut in two
HALF = 1000  # characters of a half at most
TRAINED_ON = 2000  # sentences
RIDGE = 1.0
AT_ONCE = 64  # texts
LENGTH = 128  # tokens of a text at most, as the model was trained


def row(args: argparse.Namespace, name: str) -> Row:
    """A model's measures: of the dense one, or of one that is pruned for it."""
    model, found = args.model, {}
    if name != DENSE:
        method, column = CELLS[name]
        config = GradProbeConfig(
            **METHODS[method],
            **COLUMNS[column],
            num_samples=args.num_samples,
            sequence_length=args.sequence_length,
            evaluation_samples=args.evaluation_samples,
            seed=args.seed,
            packing=False,
        )
        result = prune_pretrained(
            model,
            config,
            calibration=documents(args.calibration),
            evaluation=documents(args.evaluation),
            dtype="float32",
            progress=False,
        )
        model, measured = result.model, result.report.evaluation
        assert measured is not None, "there is a text"
        found = {
            "cosine": measured["metric"]["pruned"],
            "zeros": result.report.zeros,
            "weights": result.report.weights,
            "seconds": round(sum(result.report.timings.values()), 1),
        }
    embed = Embedder(args.model, model)
    return {"row": name, **found, **retrieval(args, embed), "accuracy": sentiment(args.sst2, embed)}


class Embedder:
    """Texts -> `[texts, hidden]`, of length one.

    Args:
        name: where the tokenizer is.
        model: the model, or its name.
    """

    def __init__(self, name: str, model: Any) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._model = AutoModel.from_pretrained(model, dtype="float32") if isinstance(model, str) else model
        self._model.eval()

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        found = [Tensor()] * len(texts)
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # little of a batch is padding
        for start in range(0, len(order), AT_ONCE):
            some = order[start : start + AT_ONCE]
            batch = self._tokenizer(
                [texts[number] for number in some],
                padding=True,
                truncation=True,
                max_length=LENGTH,
                return_tensors="pt",
            )
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden)
            pooled = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
            for number, one in zip(some, pooled, strict=True):
                found[number] = one
        return torch.stack(found)


def documents(spec: str) -> list[str]:
    """The documents of a text, which blank lines part; the first and the last of a part may be cut."""
    return [one for one in TextSpec.parse(spec).read()[0].split("\n\n") if one.strip()]


def halves(texts: Sequence[str]) -> list[tuple[str, str]]:
    """The two halves of every text that is long enough."""
    found = []
    for text in texts:
        if len(text) >= SHORTEST:
            middle = text.find(" ", min(HALF, len(text) // 2))
            found.append((text[:middle], text[middle : middle + HALF]))
    return found


def retrieval(args: argparse.Namespace, embed: Embedder) -> Row:
    """How often the second half that is nearest to a first one is its own, and how many there are to choose from."""
    firsts, seconds = zip(*halves(documents(args.evaluation)), strict=True)
    nearest = (embed(firsts) @ embed(seconds).t()).argmax(1)
    return {"recall": float((nearest == torch.arange(len(firsts))).double().mean()), "halves": len(firsts)}


def sentiment(folder: str, embed: Embedder) -> float:
    """The share of test sentences whose sentiment a ridge regression tells."""
    rows = {}
    for split, most in (("train", TRAINED_ON), ("test", None)):
        lines = (Path(folder) / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[:most]
        parts = [line.split("\t") for line in lines]
        inputs = embed([sentence for sentence, _ in parts]).double()
        rows[split] = (
            F.pad(inputs, (0, 1), value=1.0),
            torch.tensor([2.0 * int(label) - 1 for _, label in parts]).double(),
        )
    (x, y), (tested, wanted) = rows["train"], rows["test"]
    weights = torch.linalg.solve(x.t() @ x + RIDGE * torch.eye(x.shape[1], dtype=x.dtype), x.t() @ y)
    return float(((tested @ weights).sign() == wanted).double().mean())


def embeddings_table(results: dict[str, Any]) -> str:
    """A line a method; of every column cosine, recall and accuracy, the best in bold."""
    made, settings = {one["row"]: one for one in results["rows"]}, results["settings"]
    dense = made[DENSE]
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    lines.append("| dense |" + f" {', '.join(_shown({**dense, 'cosine': 1.0}))} |" * len(COLUMNS))
    for method in METHODS:
        cells = []
        for column in COLUMNS:
            rivals = [_shown(made[name]) for name, (_, its) in CELLS.items() if its == column and name in made]
            best = [max(values, key=lambda text: float(text.rstrip("%"))) for values in zip(*rivals, strict=True)]
            found = made.get(f"{method}, {column}")
            texts = [] if found is None else zip(_shown(found), best, strict=True)
            cells.append(", ".join(f"**{text}**" if text == highest else text for text, highest in texts))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    calibration, evaluation = (f"C4[{settings[name].partition('[')[2]}" for name in ("calibration", "evaluation"))
    note = (
        f"{settings['model']}: cosine to the dense embeddings; recall of the other half among {dense['halves']} "
        "documents; accuracy on the 1,821 test sentences of SST-2, of which one standard error is 1%. Calibration "
        f"{settings['num_samples']} x {settings['sequence_length']} tokens of {calibration}, cosine and halves of "
        f"{evaluation}, 1 draw, float32. Made by `make bench-embeddings`."
    )
    return "\n".join([*lines, "", note])


def _shown(row: Row) -> list[str]:
    return [f"{row['cosine']:.3f}", f"{row['recall']:.1%}", f"{row['accuracy']:.1%}"]


def main() -> None:
    parser = row_parser(__doc__, [DENSE, *CELLS], RESULTS / "embeddings.json")
    parser.add_argument(
        "--sst2", required=True, help="a folder with train.tsv and test.tsv: a sentence, a tab, a label"
    )
    parser.set_defaults(num_samples=128, sequence_length=LENGTH, evaluation_samples=64)
    print(embeddings_table(made_rows(parser.parse_args(), row)))


if __name__ == "__main__":
    main()
