"""Write the measured tables of the README and of docs/ from `benchmarks/results/*.json`, between their markers.

A marker that no table is called by, and a table that no page shows, are errors. What was not measured yet stays empty.

usage: python -m benchmarks.readme_table [--check]     (--check: fail if a page is not what the results say)
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.candidate_sums import candidate_sums_table
from benchmarks.choices import choices_table
from benchmarks.elsewhere import elsewhere_table
from benchmarks.embeddings import embeddings_table
from benchmarks.goals_table import goals_table
from benchmarks.gradient_admm import gradient_admm_table
from benchmarks.matching import matching_table
from benchmarks.mixtures_table import mixtures_table
from benchmarks.profiling import fixes_table, profiling_cost_table, worth_table
from benchmarks.quality_tables import (
    calibrated_on_c4,
    divergence_table,
    geometric_mean,
    has_headline,
    headline_table,
    intervals_table,
    presets_table,
    price_table,
    quality_table,
    rule_table,
    spread_table,
    variants_table,
    whole_columns,
)
from benchmarks.random_checkpoint import mistral_config
from benchmarks.structured_speed import speed_of_shapes
from benchmarks.structured_table import defaults_table, structured_table
from benchmarks.targets_table import targets_table
from benchmarks.text_table import texts_table
from benchmarks.training import check_alike
from benchmarks.upcast import upcast_table
from gradprobe_hf.config.values import AccumulatorDtype
from gradprobe_hf.probe.accumulation.accumulators import BYTES_PER_WEIGHT

LARGE_BLOCKS = mistral_config().num_hidden_layers
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def speed_table(results: dict[str, Any]) -> str:
    lines = [
        "| Fisher | two probes / two bare passes | candidates, masks and zeros | accumulators |",
        "|---|---:|---:|---:|",
    ]
    for row in results["rows"]:
        cells = (
            f"`{row['fisher']}`",
            f"{row['two_probes_over_two_bare_passes']:.2f}",
            f"{row['after_the_probes_seconds']:.1f} s",
            f"{row['accumulator_bytes'] / 1e6:.0f} MB",
        )
        lines.append(f"| {' | '.join(cells)} |")
    settings = results["settings"]
    weights = results["rows"][0]["target_weights"]
    note = (
        f"{settings['model']}, {weights:,} target weights, {settings['batches']}, {settings['threads']} CPU threads; "
        "medians, in one process. A bare pass makes the gradients of the weights, as training does. Made by "
        "`make bench-speed`."
    )
    return "\n".join([*lines, "", note])


def accumulators_table(results: dict[str, Any]) -> str:
    """One column for each draw of the calibration windows, and the change of the mean."""
    found: dict[AccumulatorDtype, dict[int, float]] = {}
    for row in results["rows"]:
        found.setdefault(row["method"].split(", ")[1], {})[row["seed"]] = next(iter(row["perplexity"].values()))
    seeds = sorted(found["float32"])
    lines = [
        f"| accumulators | bytes per weight and term | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |",
        "|---|---:|" + "---:|" * (len(seeds) + 1),
    ]
    means = {kind: geometric_mean(list(each.values())) for kind, each in found.items()}
    for kind, each in found.items():
        change = f" ({means[kind] / means['float32'] - 1:+.2%})" if kind != "float32" else ""
        cells = " | ".join(f"{each[seed]:.2f}" for seed in seeds)
        lines.append(f"| `{kind}` | {BYTES_PER_WEIGHT[kind]:.3g} | {cells} | {means[kind]:.2f}{change} |")
    settings, zeros = results["settings"], results["rows"][0]["zeros"]
    text, protocol = next((name, found["text"]) for name, found in settings["evaluation"].items())
    note = (
        f"Perplexity of {settings['model']} after two probes, {zeros:,} zeros (60%), for "
        f"{len(seeds)} draw{'s' * (len(seeds) > 1)} of the calibration windows, {settings['calibration']}; the mean is "
        f"geometric; evaluation {protocol} of {text}. Made by `make bench-accumulators`."
    )
    return "\n".join([*lines, "", note])


def memory_table(results: dict[str, Any]) -> str:
    lines = [
        "| model | weights, statistics | peak memory | estimated | probes | the whole run |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in sorted(results["rows"], key=lambda row: not row["large"]):
        if "peak_bytes" not in row:
            continue
        cells = (
            _shape(row),
            row["row"],
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
            f"{row['estimated_bytes'] / 1e6:,.0f} MB" if row.get("estimated_bytes") else "",
            f"{sum(_probes(row)):.0f} s",
            f"{sum(row['seconds'].values()):,.0f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    small, large = results["settings"]["small"], results["settings"]["large"]
    note = (
        f"bfloat16, {results['settings']['threads']} CPU threads; SmolLM2 {small['num_samples']} windows of "
        f"{small['sequence_length']} tokens one by one, the large model (random weights, 14.5 GB) "
        f'{large["num_samples"]} windows of {large["sequence_length"]} at once, `int8` with `fisher="sequence"`. '
        "Everything is counted, from the import of the libraries to the saved checkpoint; inspecting that afterwards "
        f"maps its files ({_with_inspection(results):,.0f} MB at most). A whole run loads, probes twice, finds "
        f"candidates, selects and saves.{_of_best(results)}{_against_bare(results)} Made by "
        "`make bench-memory`."
    )
    return "\n".join([*lines, "", note])


def _shape(row: dict[str, Any]) -> str:
    """What a row's model is; a large one may have its first blocks alone."""
    if not row["large"]:
        return "SmolLM2-135M"
    blocks = row.get("blocks", LARGE_BLOCKS)
    return "Mistral-7B's shape" + (f", {blocks} of {LARGE_BLOCKS} blocks" if blocks < LARGE_BLOCKS else "")


def _of_best(results: dict[str, Any]) -> str:
    best = next((row for row in results["rows"] if "best" in row["row"] and "peak_bytes" in row), None)
    if best is None:
        return ""
    seconds = best["seconds"]["reconstruction"] / best["blocks"]
    return f" `best` probes once, and updates weights, which takes {seconds:,.0f} s a block ({best['cpu']})."


def _probes(row: dict[str, Any]) -> list[float]:
    """The seconds of each."""
    return [seconds for stage, seconds in row["seconds"].items() if stage.startswith("probe")]


def _with_inspection(results: dict[str, Any]) -> float:
    """The largest peak of those that grew when the checkpoint was read back, in MB."""
    found = [(row.get("peak_with_inspection_bytes", 0), row.get("peak_bytes", 0)) for row in results["rows"]]
    return max((read for read, before in found if read > before), default=0) / 1e6


def _against_bare(results: dict[str, Any]) -> str:
    """How long a probe takes, in bare passes from disk."""
    of_bare = next((row for row in results["rows"] if "bare pass" in row["seconds"]), None)
    if of_bare is None:
        return ""
    bare = of_bare["seconds"]["bare pass"]
    ratios = ", ".join(
        f"{statistics.fmean(_probes(row)) / bare:.2f} ({row['row']})"
        for row in results["rows"]
        if row["large"] and "peak_bytes" in row and row.get("cpu") == of_bare.get("cpu")  # else on another machine
    )
    return (
        f" In bare passes from disk, forward and backward with the weights' gradients ({bare:.0f} s), a "
        f"probe of the large model takes {ratios}."
    )


def training_table(results: dict[str, Any]) -> str:
    """The mean over the seeds of each saliency at each sparsity, and how far the seeds lie apart."""
    runs = results["runs"]
    check_alike(runs)
    columns = sorted({run["sparsity"] for run in runs} - {0.0})
    dense = [run["bits_per_byte"] for run in runs if run["method"] == "dense"]
    lines = [
        f"| bits per byte (largest - smallest seed) | {' | '.join(f'{column:.0%}' for column in columns)} |",
        "|---|" + "---:|" * len(columns),
        f"| dense | {' | '.join([_spread(dense)] * len(columns))} |",
    ]
    for method in dict.fromkeys(run["method"] for run in runs if run["method"] != "dense"):
        cells = [
            _spread([r["bits_per_byte"] for r in runs if (r["method"], r["sparsity"]) == (method, column)])
            for column in columns
        ]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    same = runs[0]["conditions"]
    note = (
        f"A Llama of {same['parameters']:,} parameters on {same['tokens']:,} bytes of text, {len(dense)} seeds; pruned "
        f"from step {same['pruning']['begin_step']} to {same['pruning']['end_step']} of {same['steps']}, every "
        f"{same['pruning']['every']}. Runs of one seed differ in nothing but the method. Made by `make bench-training`."
    )
    return "\n".join([*lines, "", note])


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.4f} ({max(values) - min(values):.4f})"


def cost_table(results: dict[str, Any]) -> str:
    rows = results["cost"]
    lines = ["| callback | eager | compiled |", "|---|---:|---:|"]
    for name in dict.fromkeys(row["callback"] for row in rows):
        shares = {row["compiled"]: row["share"] for row in rows if row["callback"] == name}
        cells = [f"{shares[mode]:.1%}" if mode in shares else "" for mode in (False, True)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    by_mode = {row["compiled"]: row for row in rows}
    speeds = "; ".join(
        f"{'compiled' if mode else 'eager'}: {row['tokens_per_second']:.0f} tokens per second, "
        f"{row['peak_bytes'] / 1e9:.1f} GB" + (f", {row['graphs']} graph" if row["graphs"] else "")
        for mode, row in sorted(by_mode.items())
    )
    first = rows[0]
    masks = next(row["bytes_per_weight"] for row in rows if "bytes_per_weight" in row)
    note = (
        f"What a callback adds to a step of AdamW, {first['model']} in float32, {first['batch']} tokens, "
        f"{first['threads']} CPU threads ({speeds}). Masks take {masks:.3f} bytes per weight. Made by "
        "`make bench-training`."
    )
    return "\n".join([*lines, "", note])


RECOVERY_ROWS = {
    "dense": "dense",
    "pruned": "pruned",
    "recovered": "pruned, then towards the dense model",
    "recovered, own text": "the same, on text that the dense model writes",
    "cross-entropy": "pruned, then towards the text's own words",
    "dense, cross-entropy": "dense, towards the text's own words",
}
RECOVERY_TEXTS = {"tinystories": "TinyStories", "wikitext": "WikiText-2"}


def recovery_table(results: dict[str, Any]) -> str:
    texts = [text for text in RECOVERY_TEXTS if text in results["rows"]["dense"]["texts"]]
    titles = [f"{RECOVERY_TEXTS[text]}: {what}" for text in texts for what in ("perplexity", "KL")]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for name in (name for name in RECOVERY_ROWS if name in results["rows"]):
        measured = results["rows"][name]["texts"]
        values = [f"{measured[text]['perplexity']:,.2f} | {measured[text]['kl']:.3f}" for text in texts]
        lines.append(f"| {RECOVERY_ROWS[name]} | {' | '.join(values)} |")
    rates = ", ".join(f"{float(rate):g}: {one['held_out']:.3f}" for rate, one in results["rates"]["recovered"].items())
    note = (
        f"{results['model']}, {results['sparsity']:.2%} of the weights zero (preset best), {results['steps']} steps of "
        f"{results['batch_size']} x {results['sequence_length']} tokens on the seven tenths of a file of TinyStories "
        "that it was pruned on; measured on the rest of that file and on WikiText-2's test split, 20 windows each. KL "
        f"in nats per token from the dense model. Learning rate {results['learning_rate']:g}, chosen by the KL on the "
        f"held-out part of the training text ({rates}). Made by `make bench-recovery`."
    )
    return "\n".join([*lines, "", note])


def classifier_table(results: dict[str, Any]) -> str:
    lines = ["| | calibrated on | sparsity | accuracy |", "|---|---|---:|---:|"]
    for row in results["rows"]:
        lines.append(f"| {row['method']} | {row['calibration']} | {row['sparsity']:.1%} | {row['accuracy']:.1%} |")
    note = (
        f"{results['model']}, {results['blocks']} blocks, fine-tuned on {results['sentences']:,} sentences; calibrated "
        f"on {results['num_samples']} sentences, or as many tokens of other text; {results['tested']:,} sentences "
        "tested: one standard error of an accuracy is about 1%. Made by `python examples/classifier.py --model "
        f"{results['model']} --data sst2 --blocks {results['blocks']}`."
    )
    return "\n".join([*lines, "", note])


def vision_table(results: dict[str, Any]) -> str:
    rows, dense = results["rows"], results["rows"][0]["dense"]
    lines = [
        "| | zeros | loss | accuracy |",
        "|---|---:|---:|---:|",
        f"| dense | 0.0% | {dense['loss']:.3f} | {dense['accuracy']:.1%} |",
    ]
    for row in rows:
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in row["options"].items())
        if "max_metric_drop" in row["options"]:  # measured on the half that did not choose
            before = f" ({row['dense']['accuracy']:.1%} dense)"
            lines.append(f"| `{options}` | {row['sparsity']:.1%} | | {row['pruned']['accuracy']:.1%}{before} |")
        else:
            found = row["pruned"]
            lines.append(f"| `{options}` | {row['sparsity']:.1%} | {found['loss']:.3f} | {found['accuracy']:.1%} |")
    note = (
        f"A ViT of {results['parameters']:,} parameters, trained for {results['steps']} steps on {results['images']:,} "
        f"drawn images, 128 of which calibrate; {rows[0]['samples']:,} others measure. Made by `python "
        "examples/vit_shapes.py shapes --json benchmarks/results/vision.json`."
    )
    return "\n".join([*lines, "", note])


def faces_table(results: dict[str, Any]) -> str:
    """What `make demo` shows: half of the weights zero, and a quarter of the model away, each with what it lost."""
    bench, lines = results["bench"], []
    titles = ("parameters", "file", "under zstd", "perplexity", f"reads {bench['prompt_length']} tokens", "tokens/s")
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for row, speed in zip(results["rows"], bench["rows"], strict=True):
        zstd = f"{speed['zstd_bytes'] / 1e6:.0f} MB" if speed["zstd_bytes"] else ""
        cells = (
            f"{row['parameters'] / 1e6:.1f} M",
            f"{speed['file_bytes'] / 1e6:.0f} MB",
            zstd,
            f"{row['perplexity']:.2f}",
            f"{speed['prefill_seconds']['median'] * 1000:.0f} ms, {speed['ratios']['prefill_seconds']:.2f} x",
            f"{speed['tokens_per_second']['median']:.1f}, {speed['ratios']['tokens_per_second']:.2f} x",
        )
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    note = (
        f"{results['model']}, calibrated on its own text, perplexity on {results['evaluation']['source']}; "
        f"{bench['device']}, {bench['threads']} threads, medians of {bench['repeats']} rounds in which all take turns. "
        "`make bench-demo`."
    )
    return "\n".join([*lines, "", note])


PAGES = (
    "README.md",
    "docs/index.md",
    "docs/guides/presets.md",
    "docs/guides/classifier.md",
    "docs/guides/text.md",
    "docs/guides/vision.md",
    "docs/guides/embeddings.md",
    "docs/guides/recover.md",
    "docs/guides/profile.md",
    "docs/guides/smaller.md",
    "docs/method.md",
    "docs/experiments.md",
    "docs/intervals.md",
    "docs/memory.md",
    "docs/training.md",
)
# The README's rows are calibrated on C4, as the literature does, once all of them are made.
MAIN = ("c4", "wikitext")
SECOND = ("wikitext",)
EVERY_ROW = ("wikitext-rows",)


def presets_of_both(results: dict[str, Any]) -> str:
    """Seconds and memory are those of the second table's results; perplexities those of both calibrations."""
    return presets_table(results, results_of(("c4",), whole_columns))


def targets_of_both(results: dict[str, Any]) -> str:
    """The cells of SparseGPT at another target are results of their own; all else is the main table's."""
    main = results_of(("c4",))
    assert main is not None, "what it stands beside"
    return targets_table(results, main)


TABLES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], str]]] = {  # marker -> result files, table
    "headline": (MAIN, headline_table),
    "presets": (SECOND, presets_of_both),
    "grid": (SECOND, quality_table),
    "c4": (("c4",), calibrated_on_c4),
    "rule": (EVERY_ROW, rule_table),
    "price": (SECOND, price_table),
    "stories": (("stories",), spread_table),
    "variants": (("variants",), variants_table),
    "matching": (("matching",), matching_table),
    "texts": (("texts",), texts_table),
    "mixtures": (("mixtures",), mixtures_table),
    "speed": (("speed",), speed_table),
    "upcast": (("upcast",), upcast_table),
    "accumulators": (("accumulators",), accumulators_table),
    "memory": (("memory",), memory_table),
    "recovery": (("recovery",), recovery_table),
    "training": (("training",), training_table),
    "classifier": (("classifier",), classifier_table),
    "vision": (("vision",), vision_table),
    "embeddings": (("embeddings",), embeddings_table),
    "training cost": (("training",), cost_table),
    "profiling cost": (("profiling",), profiling_cost_table),
    "worth": (("profiling",), worth_table),
    "fixes": (("profiling",), fixes_table),
    "candidate sums": (("candidate_sums",), candidate_sums_table),
}
FURTHER: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], str]]] = {  # on a page that asks for them
    "stories intervals": (("stories",), intervals_table),
    "stories divergence": (("stories",), divergence_table),
    "c4 targets": (("c4-targets",), targets_of_both),
    "c4 80": (("c4-80",), quality_table),
    "c4 80 divergence": (("c4-80",), divergence_table),
    "intervals": (SECOND, intervals_table),
    "divergence": (SECOND, divergence_table),
    "every row": (EVERY_ROW, quality_table),
    "every price": (EVERY_ROW, price_table),
    "rivals": (("rivals",), quality_table),
    "rivals intervals": (("rivals",), intervals_table),
    "rivals divergence": (("rivals",), divergence_table),
    "qwen": (("qwen",), quality_table),
    "qwen intervals": (("qwen",), intervals_table),
    "qwen divergence": (("qwen",), divergence_table),
    "refined": (("refined",), quality_table),
    "refined divergence": (("refined",), divergence_table),
    "refined goals": (("refined",), goals_table),
    "refined intervals": (("refined",), intervals_table),
    "refined stories": (("refined-stories",), quality_table),
    "refined stories intervals": (("refined-stories",), intervals_table),
    "refined stories divergence": (("refined-stories",), divergence_table),
    "choices": (("choices",), choices_table),
    "gradient admm": (("gradient_admm",), gradient_admm_table),
    "paper": (("paper",), quality_table),
    "paper intervals": (("paper",), intervals_table),
    "paper divergence": (("paper",), divergence_table),
    "faces": (("demo",), faces_table),
    "smaller stories": (("structured_stories",), structured_table),
    "smaller smollm2": (("structured_smollm2",), structured_table),
    "smaller defaults": (("structured_defaults",), defaults_table),
    "smaller speed": (("structured_speed",), speed_of_shapes),
    "smaller elsewhere": (("elsewhere",), elsewhere_table),
}
ELSEWHERE = ("structures",)  # markers of what tests/structure_page.py writes
# What is shown once all of its cells are made: results are written cell by cell.
NEEDS: dict[str, Callable[[dict[str, Any]], object]] = {"headline": has_headline, "c4": whole_columns}


def results_of(
    files: Iterable[str], suffice: Callable[[dict[str, Any]], object] = lambda _: True
) -> dict[str, Any] | None:
    """The first of these results that there is and that suffices, with its name."""
    for path in (RESULTS / f"{file}.json" for file in files):
        if path.exists() and suffice(results := json.loads(path.read_text())):
            return {**results, "made_by": path.stem}
    return None


def rendered(page: str) -> str:
    """The page with every table in it made anew."""

    def made(found: re.Match[str]) -> str:
        if found["name"] in ELSEWHERE:
            return found[0]
        files, table = (TABLES | FURTHER)[found["name"]]
        results = results_of(files, *([NEEDS[found["name"]]] if found["name"] in NEEDS else []))
        if results is None:
            return found[0]
        return f"<!-- {found['name']} -->\n{table(results)}\n<!-- /{found['name']} -->"

    return re.sub(r"<!-- (?P<name>[\w ]+) -->\n.*?<!-- /(?P=name) -->", made, page, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    for name in TABLES:
        if not any(f"<!-- {name} -->" in page for page in pages.values()):
            sys.exit(f"no page shows the table {name!r}")
    for page, before in pages.items():
        after = rendered(before)
        if check and after != before:
            sys.exit(f"{page} is not what benchmarks/results say; run `make table`")
        (ROOT / page).write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
