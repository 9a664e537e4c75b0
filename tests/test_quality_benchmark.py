"""The benchmark of the README's table: what it keeps, what it makes again, and what it asks of others."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import psutil
import pytest

from benchmarks import picture, quality, quality_peers, quality_rows, quality_tables, quality_worker, readme_table
from benchmarks.quality_cells import Cell, CellFile, Dense
from benchmarks.quality_rows import Row
from benchmarks.quality_texts import TextSpec
from benchmarks.targets_table import targets_table
from benchmarks.text_table import texts_table
from gradprobe_hf.estimation.peak import peak_memory

ROOT = Path(__file__).parent.parent
HALF = ("--columns", "0.5")
METHODS = ("wanda", "sparsegpt", "two probes", "two probes + obs", "threshold rule")

# Stands in for llm-compressor: prunes by magnitude, and notes the windows it got. It imports nothing that is slow.
PEER = """
import json, sys
import numpy as np
from safetensors.numpy import load_file, save_file
model, windows, output = sys.argv[1:4]
options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
changed = {}
for name, weight in load_file(model + "/model.safetensors").items():
    if ".layers." in name and weight.ndim == 2:
        lowest = np.abs(weight).ravel().argsort(kind="stable")[: round(float(options["--sparsity"]) * weight.size)]
        changed[name] = weight.copy()
        changed[name].reshape(-1)[lowest] = 0
given = f"{options['--method']}, {options['--dtype']}, {list(load_file(windows)['input_ids'].shape)}"
save_file(changed, output, {"about": json.dumps({"seconds": 1.5, "peak_bytes": 10, "versions": {"given": given}})})
"""

# A cell that never ends; its process id is in a file.
SLEEPER = """
import os, time
from pathlib import Path
from benchmarks.quality_worker import alone

def sleep():
    Path("part").write_text(str(os.getpid()))
    Path("part").rename("pid")
    time.sleep(600)
"""


@pytest.fixture
def bench(checkpoint, text_file, other_text_file, tmp_path, monkeypatch):
    """Runs the benchmark's command line, its cells in this process; returns what is in its file."""
    output = tmp_path / "quality.json"
    monkeypatch.setattr(quality_worker, "alone", lambda function, *args: function(*args))
    monkeypatch.setattr(quality_worker, "Bench", cache(quality_worker.Bench))  # cells share what each would load
    monkeypatch.setattr(quality, "code_commit", lambda: "abc")
    monkeypatch.setattr(quality_worker, "register", lambda *_: None)  # the tables are those of all tests

    def run(*more: str, seeds=("0",)):
        words = ["--model", checkpoint, "--calibration", text_file, "--evaluation", other_text_file, "--output", output]
        words += ["--num-samples", 4, "--sequence-length", 16, "--evaluation-samples", 4, "--batch-size", 2]
        words += ["--dtype", "float32", "--seed", *seeds, *more]
        monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, words)])
        quality.main()
        return {**json.loads(output.read_text()), "made_by": "quality"}

    return run


def test_it_resumes_and_every_column_has_one_number_of_zeros(bench, monkeypatch):
    first = bench("--methods", *METHODS[:2], "--columns", "0.5")
    made = []
    plain = quality_worker.make_cell
    monkeypatch.setattr(quality_worker, "make_cell", lambda t: made.append((t.method, t.column)) or plain(t))
    found = bench("--methods", *METHODS, "--columns", "0.5", "2:4")
    assert ("wanda", "0.5") not in made
    assert ("wanda", "2:4") in made
    assert found["rows"][: len(first["rows"])] == first["rows"]
    same = {row["zeros"] for row in found["rows"] if row["column"] == "0.5" and "threshold rule" not in row["method"]}
    assert len(same) == 1
    assert quality_tables.quality_table(found).count("**") == 2 * 2, "the best of each column"
    rule = [row["zeros"] for row in found["rows"] if "threshold rule" in row["method"]]
    assert len(rule) == 4, "the rule, and three others as sparse as it"
    assert rule[0] == rule[3], "Wanda rounds in every row and SparseGPT in every matrix, the probes nowhere"
    assert max(rule) - min(rule) < 0.05 * rule[0]


def test_the_columns_behind_the_main_ones_have_the_important_rows(bench, monkeypatch):
    few = ("wanda", "wanda + admm", "magnitude", "one probe")
    methods, columns = quality.TABLES["quality"]
    monkeypatch.setitem(quality.TABLES, "quality", ({name: methods[name] for name in few}, columns))

    def made(*more):
        return sorted((row["method"], row["column"]) for row in bench(*more)["rows"])

    table = [("magnitude", "0.5"), ("one probe", "0.5"), ("one probe", "4:8"), ("wanda", "0.5"), ("wanda", "4:8")]
    assert made("--columns", "0.5", "4:8") == table
    assert made("--columns", "4:8", "--methods", "magnitude") == sorted([*table, ("magnitude", "4:8")])
    assert len(made("--columns", "0.5", "4:8", "--full")) == 2 * len(few)


def test_another_text_is_another_benchmark(bench, text_file):
    wanda = bench("--methods", "wanda", "--columns", "0.5")
    others = ("--methods", "sparsegpt", *HALF, "--num-samples", "3")
    with pytest.raises(SystemExit, match="has cells of other settings"):
        bench(*others)
    assert bench("--methods", "wanda", "--columns", "0.5") == wanda, "nothing was lost"
    found = bench(*others, "--fresh")
    assert [row["method"] for row in found["rows"]] == ["sparsegpt"]


def test_cells_of_other_code_are_refused_unless_told(bench, monkeypatch):
    bench("--methods", "wanda", *HALF)
    monkeypatch.setattr(quality, "code_commit", lambda: "def")
    with pytest.raises(SystemExit, match=r"cells of other code \(abc, not def\): --fresh forgets them, --mixed"):
        bench("--methods", "sparsegpt", *HALF)
    found = bench("--methods", "sparsegpt", *HALF, "--mixed")
    assert [row["commit"] for row in found["rows"]] == ["abc", "def"]
    assert "; cells of several commits (abc, def)." in quality_tables.quality_table(found)
    with pytest.raises(ValueError, match="cells of several commits, abc, def"):
        quality_tables.quality_table({**found, "mixed": False})


def test_two_runs_may_fill_one_file(tmp_path):
    path = tmp_path / "cells.json"
    one, other = CellFile(path, "abc"), CellFile(path, "abc")
    one.begin({"model": "m"}, Dense({"text": 1.0}))
    other.begin({"model": "m"}, Dense({"text": 1.0}))
    for file, method in ((one, "a"), (other, "b"), (one, "c")):
        file.add(Cell(method, 0, "0.5", 1, 2, {"text": 2.0}, 1.0, None, {}), {})
    assert {row["method"] for row in json.loads(path.read_text())["rows"]} == {"a", "b", "c"}


def test_a_cell_that_fails_is_named_and_the_others_are_made(bench, monkeypatch, capsys):
    plain = quality_worker.make_cell
    fails = [True]

    def made(task):
        if task.method == "wanda" and fails.pop():
            raise MemoryError("no room")
        return plain(task)

    monkeypatch.setattr(quality_worker, "make_cell", made)
    with pytest.raises(SystemExit, match=r"failed: wanda, 0.5, seed 0\. The same command tries again"):
        bench("--methods", "wanda", "sparsegpt", *HALF)
    assert "MemoryError: no room" in capsys.readouterr().err
    monkeypatch.setattr(quality_worker, "make_cell", plain)
    assert [row["method"] for row in bench("--methods", "wanda", "sparsegpt", *HALF)["rows"]] == ["sparsegpt", "wanda"]


def test_a_cell_says_how_far_it_is_from_the_dense_model(bench):
    results = bench("--methods", "wanda", "sparsegpt", *HALF)
    (text,) = results["dense"]
    for found in (
        {"perplexity": results["dense"], "losses": results["dense_losses"]},
        *results["rows"],
    ):
        losses = found["losses"][text]
        assert len(losses) == 4
        assert math.exp(sum(losses) / 4) == pytest.approx(found["perplexity"][text], rel=1e-4)
    wanda = results["rows"][0]
    assert wanda["kl"][text] > 0
    assert 0 < wanda["agreement"][text] <= 1
    shown = quality_tables.divergence_table(results)
    assert f"| wanda | {wanda['kl'][text]:.2f}, {wanda['agreement'][text]:.0%} |" in shown
    ratio = wanda["perplexity"][text] / results["rows"][1]["perplexity"][text]
    assert f"| wanda | {ratio:.2f} [" in quality_tables.intervals_table(results)


def test_parts_of_a_text_do_not_overlap(text_file):
    first, last = (TextSpec.parse(f"{text_file}{part}").read()[0] for part in ("[:70%]", "[70%:]"))
    assert first + last == text_file.read_text(encoding="utf-8")
    assert len(first) / len(last) == pytest.approx(7 / 3, rel=0.01)


def test_a_text_may_be_measured_whole(bench, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("A text of forty bytes, with its newline\n" * 5, encoding="utf-8")
    results = bench("--methods", "wanda", *HALF, "--evaluation", f"paper:{text}", f"{text}=3")
    whole, drawn = (found["text"] for found in results["settings"]["evaluation"].values())
    assert whole == f"{5 * 42 // 64} x 64", "all windows of the model's context, rows apart by blank lines"
    assert drawn == "3 x 16"


def test_draws_are_counted_and_ratios_are_of_the_same_draws(bench):
    bench("--methods", "wanda", "sparsegpt", *HALF)
    results = bench("--methods", "sparsegpt", *HALF, seeds=("1",))
    grid = quality_tables.quality_table(results)
    assert "1 draw, 2 draws of sparsegpt;" in grid
    (text,) = results["dense"]
    wanda, first, _ = (row["perplexity"][text] for row in results["rows"])
    assert f"({wanda / first:.2f})" in grid.replace("**", "")
    fair = quality_tables.even(results)
    assert [(row["method"], row["seed"]) for row in fair["rows"]] == [("wanda", 0), ("sparsegpt", 0)]
    assert quality_tables.even(results, ["sparsegpt"]) == results


@pytest.mark.slow
def test_a_process_of_its_own_has_a_memory_of_its_own():
    grown = quality_worker.alone(_peak_after, 300_000_000)
    assert quality_worker.alone(_peak_after, 0) < grown - 200_000_000


def _peak_after(size):
    bytearray(b"x") * size
    return peak_memory()["peak_resident_bytes"]


@pytest.mark.slow
def test_a_process_of_its_own_ends_with_the_one_that_is_killed(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    call = "import sleeper; sleeper.alone(sleeper.sleep)"
    parent = subprocess.Popen([sys.executable, "-c", call], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path)
    try:
        waited_for((tmp_path / "pid").exists)
        child = int((tmp_path / "pid").read_text())
        assert is_alive(child)
    finally:
        parent.kill()
        parent.wait()
    waited_for(lambda: not is_alive(child))


def waited_for(condition):
    """Until it is true; it has two minutes."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 120
        time.sleep(0.1)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_peer_is_given_the_same_windows_and_measured_like_the_rest(bench, tmp_path, monkeypatch):
    script = tmp_path / "peer.py"
    script.write_text(PEER, encoding="utf-8")
    monkeypatch.setattr(quality_peers, "SCRIPT", script)
    monkeypatch.setitem(quality_rows.METHODS, "magnitude", Row({"score": "magnitude", "scope": "tensor"}))
    found = bench("--methods", "magnitude", *quality_rows.PEERS, "--columns", "0.5", "--peers", sys.executable)
    own, sparsegpt, wanda = found["rows"]
    assert sparsegpt["perplexity"] == wanda["perplexity"] == pytest.approx(own["perplexity"], rel=1e-6)
    assert sparsegpt["zeros"] == own["zeros"]
    assert (wanda["seconds"], wanda["peak_bytes"], wanda["passes"]) == (1.5, 10, {})
    assert found["versions"]["llm-compressor: given"] == "wanda, float32, [4, 16]"


def test_a_row_may_have_a_calibration_text_of_its_own(bench, monkeypatch):
    sizes = dict(zip(quality_rows.TEXTS, (2, 4, 6, 4), strict=True))
    texts = quality_rows.TEXTS
    rows = {
        name: Row({**texts[name].options, "num_samples": size}, calibration=texts[name].calibration)
        for name, size in sizes.items()
    }
    monkeypatch.setitem(quality.TABLES, "texts", (rows, ("0.5",)))
    results = bench("--texts")
    found = {row["method"]: next(iter(row["perplexity"].values())) for row in results["rows"]}
    assert len(set(found.values())) == len(rows), "each is another text"
    assert found["64 windows"] == _perplexity_of("two probes", bench("--fresh", "--methods", "two probes", *HALF))
    shown = " | ".join(f"{value:.2f}" for value in found.values())
    assert f"| 50% | {shown} |" in texts_table(results)


def test_a_row_may_be_recovered(bench, monkeypatch):
    row = Row({"score": "magnitude", "recovery_steps": 10, "recovery_learning_rate": 5e-3})
    monkeypatch.setitem(quality_rows.METHODS, "magnitude + recovery", row)
    results = bench("--methods", "magnitude + recovery", "magnitude", *HALF)
    rows = {row["method"]: row for row in results["rows"]}
    (text,) = results["dense"]
    recovered, pruned = rows["magnitude + recovery"], rows["magnitude"]
    assert recovered["kl"][text] < pruned["kl"][text]
    assert recovered["zeros"] == pruned["zeros"]


@pytest.mark.parametrize(
    ("method", "message"), [("wandb", "'wandb' is none of: wanda"), ("llm-compressor, wanda", "needs --peers")]
)
def test_a_method_that_cannot_be_made_is_refused_before_anything_is_read(bench, method, message, capsys):
    with pytest.raises(SystemExit):
        bench("--model", "nowhere", "--methods", method)
    assert message in capsys.readouterr().err


def test_the_tables_say_what_the_results_say(bench):
    results = bench("--methods", *METHODS, *HALF, seeds=("0", "1"))
    cells = {(row["method"], row["column"], row["seed"]): row for row in results["rows"]}
    text = next(iter(results["dense"]))
    values = [cells["two probes", "0.5", seed]["perplexity"][text] for seed in (0, 1)]
    mean = (values[0] * values[1]) ** 0.5
    stories = quality_tables.spread_table(results)
    assert f"| two probes | {mean:,.2f} ({max(values) / min(values):.3f})" in stories.replace("**", "")
    ratios = [value / cells["sparsegpt", "0.5", seed]["perplexity"][text] for seed, value in enumerate(values)]
    draws = quality_tables.draws_table(results)
    apart = f"{(max(values) - min(values)) / min(values):.0%}"
    assert f"| two probes | {apart} ({min(ratios):.2f} to {max(ratios):.2f}) |" in draws
    grid = quality_tables.quality_table(results)
    assert f"{mean:,.2f} (" in grid
    assert "threshold rule" not in grid, "its sparsity is another"
    assert grid.count("**") == 2, "the best of the column"
    rule = cells["threshold rule", "0.5", 0]
    assert f"| {rule['zeros'] / rule['weights']:.2%} | threshold rule |" in quality_tables.rule_table(results)
    assert "| two probes + obs | 5, 2 |" in quality_tables.price_table({**results, "rows": _at_60(results["rows"])})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (0, "one number of zeros. Made"),
        (5, "one number of zeros, to 0.00050% of the weights."),
        (
            500,
            "0.050% of the weights apart (as many as Wanda, which rounds its budget in every row: 50% is 50.00 to",
        ),
    ],
)
def test_the_protocol_says_how_far_apart_the_zeros_are(bench, more, said):
    results = bench("--methods", "wanda", "sparsegpt", "--columns", "0.5")
    for row in results["rows"]:
        row |= {"weights": 10**6, "zeros": 5 * 10**5 + more * (row["method"] == "wanda")}
    found = quality_tables.quality_table(results)
    assert said in found


def test_the_protocol_says_how_far_off_the_zeros_of_others_are(bench):
    results = bench("--methods", "sparsegpt", "--columns", "0.5")
    (own,) = results["rows"]
    own |= {"weights": 10**6, "zeros": 5 * 10**5}
    results["rows"].append({**own, "method": "llm-compressor, wanda", "zeros": 5 * 10**5 - 1200})
    assert "one number of zeros; llm-compressor's are up to 0.12% of the weights off" in quality_tables.quality_table(
        results
    )


def test_the_picture_knows_what_it_shows(bench):
    values = picture.shown(bench("--methods", "wanda", "sparsegpt", "--columns", "0.5"))
    (panel,) = picture.figure(values).axes
    drawn = {line.get_label(): line.get_ydata()[0] for line in panel.lines if len(line.get_ydata())}
    (found,) = values.values()
    assert drawn["sparsegpt"] == found["methods"]["sparsegpt"]["0.5"]
    again = json.loads(json.dumps(values).replace("sparsegpt", "sparse"))
    assert picture.digest(values) != picture.digest(again)


def test_the_readme_is_of_c4_once_all_of_its_cells_are_made(tmp_path, monkeypatch):
    every_row = json.loads((readme_table.RESULTS / "wikitext.json").read_text())
    shown = {method for methods in quality_tables.HEADLINE.values() for method in methods}
    cells = [row for row in every_row["rows"] if row["method"] in shown]
    c4 = [{**row, "commit": "abc", "perplexity": dict.fromkeys(row["perplexity"], 7.25)} for row in cells]
    pages = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("headline", "grid", "c4", "presets"))
    settings = {**every_row["settings"], "calibration": "64 x 512 of C4"}
    monkeypatch.setattr(readme_table, "RESULTS", tmp_path)
    (tmp_path / "wikitext.json").write_text(json.dumps(every_row))
    of_wikitext = readme_table.rendered(pages)
    started = [row for row in c4 if row["method"] != "one probe + admm"]
    last = [row for row in c4 if (row["method"], row["column"]) == ("one probe + admm", "0.7")]
    for rows in ([], started, [row for row in c4 if row not in last]):
        (tmp_path / "c4.json").write_text(json.dumps({**every_row, "settings": settings, "rows": rows}))
        so_far = readme_table.rendered(pages)
        assert (so_far == of_wikitext) == (rows in ([], started)), "a column is shown once it is whole"
        assert so_far.partition("<!-- c4 -->")[0] == of_wikitext.partition("<!-- c4 -->")[0]
    assert "(ratio to SparseGPT) | 50% | 60% | 2:4 |" in so_far.partition("<!-- c4 -->")[2]

    (tmp_path / "c4.json").write_text(json.dumps({**every_row, "settings": settings, "rows": c4}))
    parts = re.split(r"(?=<!-- \w)", readme_table.rendered(pages))
    headline, grid, section, presets = parts[1:]
    assert '| `preset="best"` | 7.25 / 7.25 |' in headline
    assert "on 64 x 512 of C4 (neither text calibrates), 1 draw. Made by `make bench-c4` at abc." in headline
    assert grid in of_wikitext
    assert section.startswith("<!-- c4 -->\n### Calibrated on C4")
    assert "| sparsegpt | **7.25 (1.00)** |" in section
    rows = [line for line in presets.splitlines() if line.startswith("| 60% | `")]
    assert rows[0].endswith(" 54.38 / 46.13 |  |"), "one probe alone was not made there"
    assert rows[1].endswith(" 48.34 / 42.33 | 7.25 / 7.25 |")


def _perplexity_of(method, results):
    return next(next(iter(row["perplexity"].values())) for row in results["rows"] if row["method"] == method)


def _at_60(rows):
    return [{**row, "column": "0.6"} for row in rows if row["column"] == "0.5"]


def test_sparsegpt_at_another_target_stands_beside_the_same_draws_alone():
    def cell(method, seed, perplexity, windows="w"):
        of = {"column": "0.6", "zeros": 6, "weights": 10, "commit": "abc", "calibration": f"{windows}{seed}"}
        return {"method": method, "seed": seed, "perplexity": {"manual": perplexity}, **of}

    head = {"settings": {"model": "tiny"}, "dense": {"manual": 2.0}}
    of_main = [cell(method, seed, 8.0 + seed) for method in ("sparsegpt", "one probe + admm") for seed in (0, 1)]
    main, other = {**head, "rows": of_main}, {**head, "rows": [cell("sparsegpt, dense_target 0.25", 1, 6.0)]}
    table = targets_table(other, main)
    assert "| sparsegpt | 9.00 |" in table
    assert "| the last over the second | 1.50 |" in table
    assert "1 draw of" in table
    with pytest.raises(ValueError, match="other settings"):
        targets_table({**other, "settings": {"model": "another"}}, main)
    with pytest.raises(ValueError, match="other calibration windows"):
        targets_table({**head, "rows": [cell("sparsegpt, dense_target 0.25", 1, 6.0, "v")]}, main)
