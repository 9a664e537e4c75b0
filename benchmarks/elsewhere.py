"""Where a smaller checkpoint runs: other runtimes, each in an environment of its own, beside transformers.

Two smaller models are cut out of one, and each runtime converts and runs both: what it writes greedily has to be what
transformers writes. What goes does not matter here, only which shapes are left: it is the first units and blocks.

    make bench-elsewhere      # a model of 15M; environments of a few gigabytes in runs/elsewhere

usage: python -m benchmarks.elsewhere --model DIR [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.structured_speed import amounts_of, cut
from gradprobe_hf.structures.table import shape_words

RESULTS = Path(__file__).parent / "results"
SHAPES = ("ffn=256,blocks=1", "ffn=576,kv_groups=3")
PROMPT, NEW = "Once upon a time", 20
TORCH = f"torch=={torch.__version__.partition('+')[0]}"

# Each is given a folder, and prints a line of JSON: the `ids` or the `text` that follow the prompt, and by `how` if not
# plainly. It reads the prompt's `ids`, and how many are `new`.
HEAD = """
import json, sys
folder, given = sys.argv[1], json.loads(sys.argv[2])
def say(**found): print(json.dumps(found))
"""
TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ids = torch.tensor([given["ids"]])
found = model.generate(ids, max_new_tokens=given["new"], min_new_tokens=given["new"], do_sample=False)
say(ids=found[0, ids.shape[1]:].tolist())
"""
LLAMA_CPP = """
import subprocess, glob, xllamacpp
converter = glob.glob(sys.argv[3] + "/*/vendor/llama.cpp/convert_hf_to_gguf.py")[0]
subprocess.run([sys.executable, converter, folder, "--outfile", folder + ".gguf", "--outtype", "f32"],
               check=True, capture_output=True)
params = xllamacpp.CommonParams()
params.model.path = folder + ".gguf"
asked = {"prompt": given["ids"], "max_tokens": given["new"], "temperature": 0.0, "ignore_eos": True}
say(text=xllamacpp.Server(params).handle_completions(asked)["choices"][0]["text"])
"""
ONNX = """
import torch
from optimum.onnxruntime import ORTModelForCausalLM
ids, new = torch.tensor([given["ids"]]), given["new"]
def written(**cache):
    model = ORTModelForCausalLM.from_pretrained(folder, export=True, **cache)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                           do_sample=False, **cache)
    return found[0, ids.shape[1]:].tolist()
try:
    say(ids=written())
except Exception:
    say(ids=written(use_cache=False), how="without a cache")
"""
OPENVINO = """
import torch
from optimum.intel import OVModelForCausalLM
model = OVModelForCausalLM.from_pretrained(folder, export=True, ov_config={"INFERENCE_PRECISION_HINT": "f32"})
ids = torch.tensor([given["ids"]])
found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=given["new"],
                       min_new_tokens=given["new"], do_sample=False)
say(ids=found[0, ids.shape[1]:].tolist())
"""


@dataclass(frozen=True)
class Runtime:
    """What runs a checkpoint.

    Attributes:
        packages: of its environment, as pip takes them.
        program: behind `HEAD`.
        named: the packages whose versions its row names.
        source: a source package that is unpacked beside it, for what no wheel has.
        without: packages that others bring along, and that are taken out again.
    """

    packages: tuple[str, ...]
    program: str
    named: tuple[str, ...]
    source: str | None = None
    without: tuple[str, ...] = ()


RUNTIMES = {
    "transformers": Runtime((TORCH, "transformers==5.5.4"), TRANSFORMERS, ("transformers",)),
    "llama.cpp": Runtime(
        (TORCH, "xllamacpp", "gguf==0.19.0", "transformers==5.23.0", "sentencepiece", "protobuf", "scikit-build-core"),
        LLAMA_CPP,
        ("xllamacpp", "gguf"),
        source="llama-cpp-python==0.3.36",
    ),
    "ONNX Runtime": Runtime(
        (TORCH, "transformers==4.57.6", "optimum-onnx==0.1.0", "onnxruntime", "onnx"),
        ONNX,
        ("optimum-onnx", "onnxruntime", "transformers"),
    ),
    "OpenVINO": Runtime(
        (TORCH, "transformers==5.5.4", "optimum-intel==2.2.0", "openvino==2026.4.1"),
        OPENVINO,
        ("optimum-intel", "openvino", "transformers"),
        without=("torchvision",),  # built for CUDA it does not go with a torch for CPUs
    ),
}


def environment(runtime: Runtime, folder: Path) -> Path:
    """The Python of the environment that has a runtime; made if it is not there."""
    python, done = folder / "bin" / "python", folder / "done"
    asked = json.dumps([*runtime.packages, runtime.source, *runtime.without])
    if not done.exists() or done.read_text(encoding="utf-8") != asked:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *runtime.packages], check=True)
        if runtime.without:
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *runtime.without], check=True)
        if runtime.source is not None:
            fetch = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
            subprocess.run([*fetch, "--no-binary", ":all:", "--dest", str(folder), runtime.source], check=True)
            for archive in folder.glob("*.tar.gz"):
                with tarfile.open(archive) as packed:
                    packed.extractall(folder / "source", filter="data")
        done.write_text(asked, encoding="utf-8")
    return python


def run(python: Path, runtime: Runtime, checkpoint: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a runtime makes of a checkpoint; what it says where it fails."""
    source = python.parent.parent / "source"
    command = [str(python), "-c", HEAD + runtime.program, str(checkpoint), json.dumps(given), str(source)]
    made = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in made.stdout.splitlines() if line.startswith("{")]
    if made.returncode or not lines:
        said = made.stderr.strip().splitlines() or ["nothing"]
        return {"error": said[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    program = (
        f"from importlib.metadata import version as v; import json; print(json.dumps({{n: v(n) for n in {names}}}))"
    )
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", program], capture_output=True, text=True).stdout)
    return found


def verdict(found: Mapping[str, Any], wanted: Sequence[int], text: str) -> str:
    """What the table says of a runtime and a checkpoint."""
    if "error" in found:
        return f"no: {found['error']}"
    same = found["ids"] == list(wanted) if "ids" in found else found["text"].strip() == text.strip()
    return (f"{found['how']}: " if "how" in found else "") + ("same" if same else "another text")


def elsewhere_table(results: Mapping[str, Any]) -> str:
    """A row for each runtime, a column for each model."""
    shapes = results["settings"]["shapes"]
    letters = "ABCDEF"[: len(shapes)]
    lines = [f"| | versions | {' | '.join(letters)} |", f"|---|---|{'---|' * len(shapes)}"]
    for row in results["rows"]:
        named = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        lines.append(f"| {row['runtime']} | {named} | {' | '.join(row['verdicts'][shape] for shape in shapes)} |")
    settings = results["settings"]
    without = "; ".join(
        f"{letter}: without {shape_words(amounts_of(shape))}" for letter, shape in zip(letters, shapes, strict=True)
    )
    note = (
        f"{settings['model']}, float32. {without}. Same: {settings['new']} tokens, written greedily behind "
        f"{settings['prompt']!r}, are those of transformers {settings['transformers']}. `make bench-elsewhere`."
    )
    return "\n".join([*lines, "", note])


def wanted(folder: Path, ids: Sequence[int]) -> list[int]:
    """What transformers writes here."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([list(ids)])
    found = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--only", nargs="+", choices=list(RUNTIMES), default=list(RUNTIMES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/elsewhere"), help="for environments and checkpoints")
    parser.add_argument("--output", type=Path, default=RESULTS / "elsewhere.json")
    args = parser.parse_args()
    made = args.folder.absolute() / "models"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    checkpoints = cut(args.model, "float32", args.shapes, made)[1:]
    for checkpoint in checkpoints:
        tokenizer.save_pretrained(checkpoint)
    ids = tokenizer(PROMPT)["input_ids"]
    expected = {checkpoint: wanted(checkpoint, ids) for checkpoint in checkpoints}
    rows: list[dict[str, Any]] = []
    for name in args.only:
        runtime = RUNTIMES[name]
        python = environment(runtime, args.folder.absolute() / name.replace(" ", "-"))
        verdicts = {}
        for checkpoint, tokens in expected.items():
            found = run(python, runtime, checkpoint, {"ids": ids, "new": NEW})
            verdicts[checkpoint.name] = verdict(found, tokens, tokenizer.decode(tokens))
        found_here = versions(python, runtime.named)
        if runtime.source is not None:
            found_here |= dict([runtime.source.split("==")])
        rows.append({"runtime": name, "versions": found_here, "verdicts": verdicts})
        print(json.dumps(rows[-1]))
    settings = {"model": Path(args.model).name, "shapes": args.shapes, "prompt": PROMPT, "new": NEW}
    settings["transformers"] = versions(Path(sys.executable), ["transformers"])["transformers"]
    if args.output.exists():  # rows of others stay, of the same models
        before = json.loads(args.output.read_text(encoding="utf-8"))
        if before["settings"] == settings:
            rows += [row for row in before["rows"] if row["runtime"] not in args.only]
    rows.sort(key=lambda row: list(RUNTIMES).index(row["runtime"]))
    results = {"settings": settings, "rows": rows}
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(elsewhere_table(results))


if __name__ == "__main__":
    main()
