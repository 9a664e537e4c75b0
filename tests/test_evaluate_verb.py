"""`gradprobe evaluate`: beside a dense model, by the paper protocol, on tasks, and into a card."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard, RepoCard
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gradprobe_hf import prune_pretrained, recover_pretrained
from gradprobe_hf.cli import main
from gradprobe_hf.data.text.paper_protocol import PaperSpec, paper_batches
from gradprobe_hf.evaluation import harness
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.report.eval_results import task_results
from tests import cases, labelled

TEXT = ["--num-samples", "4", "--sequence-length", "16"]


@pytest.fixture
def evaluated(capsys):
    """Run the verb: exit code, standard output, standard error."""

    def run(*arguments):
        try:
            code = main(["evaluate", *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture(scope="module")
def pruned(checkpoint, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "tiny-50"
    config = cases.config(preset="fast", num_samples=4, sequence_length=16, evaluation_samples=4)
    texts = {"calibration": str(text_file), "evaluation": "pydoc"}
    return prune_pretrained(str(checkpoint), config, output_dir=folder, progress=False, **texts).report, folder


@pytest.mark.parametrize(
    "given",
    [
        *(("--num-samples", value) for value in ("0", "-3", "2.5")),
        *(("--sequence-length", value) for value in ("0", "1", "-8")),
        *(("--batch-size", value) for value in ("0", "-1", "auto")),
        ("--limit", "0"),
        ("--num-fewshot", "-1"),
    ],
    ids=" ".join,
)
def test_a_number_that_is_none_is_refused_by_its_flag(given, checkpoint, evaluated):
    code, out, err = evaluated(checkpoint, "--data", "pydoc", *given)
    assert (code, out) == (2, "")
    assert f"{given[0]}: {given[1]!r} is not a whole number >= " in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "there is nothing to measure: give a text (--data), --protocol paper, or --tasks"),
        (("--tasks", "arc", "--num-samples", "3"), "--num-samples has no effect here: it belongs to --data"),
        (("--protocol", "paper", "--num-samples", "3"), "--num-samples has no effect here: it belongs to --data"),
        (("--tasks", "arc", "--sequence-length", "9"), "it belongs to --data or --protocol paper"),
        (("--data", "pydoc", "--limit", "3"), "--limit has no effect here: it belongs to --tasks"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_said_before_a_model_is_loaded(given, message, evaluated, tmp_path):
    code, out, err = evaluated(tmp_path / "no model", *given)
    assert (code, out) == (1, "")
    assert message in err


def test_against_the_dense_model_is_what_the_report_has(pruned, checkpoint, evaluated):
    report, folder = pruned
    _, said, _ = evaluated(folder, "--against", checkpoint, "--data", "pydoc", *TEXT, "--json")
    found, wanted = json.loads(said), report.evaluation
    assert found["fingerprint"] == wanted["fingerprint"]
    assert found["perplexity"] == pytest.approx(wanted["pruned"]["perplexity"], rel=1e-6)
    assert found["dense"] == wanted["dense"]
    for name in ("kl", "top1_agreement", "perplexity_ratio", "perplexity_ratio_interval"):
        assert found["divergence"][name] == pytest.approx(wanted["divergence"][name], rel=1e-5), name
    _, said, _ = evaluated(folder, "--against", checkpoint, "--data", "pydoc", *TEXT)
    assert f"{wanted['divergence']['kl']:.4f}" in said
    assert "top-1 agreement" in said
    assert "95% interval" in said


def test_a_model_that_is_not_what_was_pruned_is_called_by_its_name(pruned, checkpoint, evaluated, tmp_path):
    """It was "the dense model", in the card too."""
    folder = tmp_path / "tiny-50"
    shutil.copytree(pruned[1], folder)
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "another")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "another")
    measure = ("--data", "pydoc", *TEXT, "--write-card")
    code, _, err = evaluated(folder, "--against", tmp_path / "another", *measure)
    assert code == 0
    assert f"was pruned from '{checkpoint.name}', and --against is" in err
    assert "Top-1 agreement with another" in {
        one.metric_name for one in ModelCard.load(folder / "README.md").data.eval_results
    }
    assert "was pruned from" not in evaluated(folder, "--against", checkpoint, *measure)[2]
    names = {one.metric_name for one in ModelCard.load(folder / "README.md").data.eval_results}
    assert "Top-1 agreement with the dense model" in names
    assert "Top-1 agreement with another" not in names


def test_a_model_of_few_positions_has_shorter_windows_by_default(checkpoint, evaluated):
    code, said, note = evaluated(checkpoint, "--data", "pydoc", "--num-samples", "2", "--json")
    assert code == 0, note
    assert "2 windows of 64 tokens" in json.loads(said)["protocol"]
    assert "64 positions" in evaluated(checkpoint, "--data", "pydoc", "--sequence-length", "128")[2]


def test_models_of_different_tokenizers_are_not_compared(pruned, checkpoint, evaluated, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["gradient"])
    tokenizer.save_pretrained(tmp_path / "other")
    code, _, err = evaluated(pruned[1], "--against", tmp_path / "other", "--data", "pydoc", *TEXT)
    assert code == 1
    assert "have different tokenizers" in err


def test_a_dense_model_of_fewer_positions_is_told(checkpoint, evaluated, tmp_path):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": cases.VOCABULARY}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "short")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "short")
    asked = ("--data", "pydoc", "--num-samples", "2", "--sequence-length", "16")
    code, _, err = evaluated(checkpoint, "--against", tmp_path / "short", *asked)
    assert code == 1
    assert "16 tokens in a row, and GPT2LMHeadModel has 8 positions" in err


def test_a_dense_model_for_something_else_is_told(checkpoint, evaluated, tmp_path):
    cases.build("bert").save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "other")
    code, _, err = evaluated(checkpoint, "--against", tmp_path / "other", "--data", "pydoc", *TEXT)
    assert code == 1
    assert re.search(r"is for text-generation, and .*other for fill-mask: name the dense model", err)


def test_a_dense_model_that_numbers_its_labels_otherwise_is_told(evaluated, tmp_path):
    """Its accuracy would be that of exchanged labels."""
    rows = labelled.classified()
    for name in ("pruned", "dense"):
        model = labelled.build("bert")
        names = sorted(labelled.LABELS, reverse=name == "dense")
        model.config.id2label, model.config.label2id = dict(enumerate(names)), {one: n for n, one in enumerate(names)}
        model.save_pretrained(tmp_path / name)
        labelled.tokenizer().save_pretrained(tmp_path / name)
    rows.to_json(tmp_path / "rows.jsonl")
    asked = ("--data", tmp_path / "rows.jsonl", "--num-samples", "4")
    code, _, err = evaluated(tmp_path / "pruned", "--against", tmp_path / "dense", *asked)
    assert code == 1
    assert re.search(r"number their labels differently \('negative' is 0 and 2, id2label in config\.json\)", err)
    with pytest.raises(ValueError, match="the pruned model and the teacher number their labels differently"):
        recover_pretrained(str(tmp_path / "pruned"), str(tmp_path / "dense"), text=rows, evaluation=False)


# The paper protocol.

LINES = ["", " = A heading = \n", "", " Words of one paragraph . \n", " More words , and more . \n", "", ""] * 4


def as_the_scripts(model, tokenizer, rows, seqlen):
    """What opt.py and llama.py of GPTQ do, restated: a loss a window, and the exp of their mean."""
    ids = tokenizer("\n\n".join(rows), return_tensors="pt").input_ids
    losses = []
    for i in range(ids.numel() // seqlen):
        window = ids[:, i * seqlen : (i + 1) * seqlen]
        with torch.no_grad():
            logits = model(window).logits
        losses.append(torch.nn.CrossEntropyLoss()(logits[0, :-1], window[0, 1:]).double() * seqlen)
    return math.exp(torch.stack(losses).sum() / (len(losses) * seqlen)), len(losses)


def beginning_with_bos():
    tokenizer = cases.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [cases.tokenizer(), beginning_with_bos()], ids=["plain", "bos"])
def test_the_paper_protocol_is_what_the_scripts_do(tokenizer, tmp_path):
    model = cases.build("llama", torch.float64)
    wanted, windows = as_the_scripts(model, tokenizer, LINES, 32)
    (tmp_path / "raw.txt").write_text("".join(line or " \n" for line in LINES), encoding="utf-8")
    for source in (LINES, str(tmp_path / "raw.txt")):
        batches = paper_batches(source, model, tokenizer, PaperSpec(length=32, batch_size=3))
        assert batches.samples == windows
        assert measure(cases.workload(model, batches)).perplexity == pytest.approx(wanted, rel=1e-9)
    first = batches.items[0]["input_ids"][0, 0].item()
    assert (first == 256) == ("<s> at the very start only" in batches.protocol)
    assert paper_batches(LINES, model, tokenizer).longest == model.config.max_position_embeddings


def test_a_line_ends_where_a_file_has_it_end(tmp_path):
    """Not at a form feed, nor at what Unicode takes for the end of a line or paragraph."""
    model, tokenizer = cases.build("llama"), cases.tokenizer()
    lines = ["one two\u2028three \x85 four\x0cfive \n", "\n"] * 20
    (tmp_path / "raw.txt").write_text("".join(lines), encoding="utf-8")
    of_file, of_rows = (
        paper_batches(source, model, tokenizer) for source in (str(tmp_path / "raw.txt"), [*lines[:1], ""] * 20)
    )
    assert of_file.fingerprint == of_rows.fingerprint


def test_the_paper_protocol_reads_a_file_of_any_name_as_its_lines(tmp_path, monkeypatch):
    model, tokenizer = cases.build("llama"), cases.tokenizer()
    raw = "".join(f"{line}\n" for line in LINES)
    for name, begins in (("a.txt", ""), ("b.TXT", ""), ("c.txt", "\ufeff")):
        (tmp_path / name).write_text(begins + raw, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b.TXT"), str(tmp_path / "c.txt"), "~/a.txt"]
    found = {paper_batches(source, model, tokenizer, PaperSpec(length=32)).fingerprint for source in sources}
    assert len(found) == 1
    rows = [{"text": line} for line in LINES]
    assert paper_batches(rows, model, tokenizer).fingerprint == paper_batches(LINES, model, tokenizer).fingerprint


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pydoc", r"one text that others can have, and 'pydoc' is none"),
        ({"a.txt": 1}, r"one text that others can have"),
        ([{"text": 3}], r"must hold texts for the paper protocol, and holds int"),
    ],
)
def test_what_the_paper_protocol_does_not_read_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        paper_batches(source, cases.build("llama"), cases.tokenizer())


def test_the_paper_protocol_says_what_it_cannot_do(checkpoint, text_file, evaluated, tmp_path):
    (tmp_path / "short.txt").write_text("too little", encoding="utf-8")
    paper = (checkpoint, "--protocol", "paper", "--data")
    assert "less than one window of 64: give more text" in evaluated(*paper, tmp_path / "short.txt")[2]
    assert (
        "--sequence-length 128 is more than the 64 positions"
        in evaluated(*paper, text_file, "--sequence-length", "128")[2]
    )
    code, said, _ = evaluated(*paper, text_file, "--json")
    assert code == 0
    assert "in order, of the rows joined by blank lines" in json.loads(said)["protocol"]


def test_a_run_is_measured_by_the_paper_protocol():
    model, tokenizer = cases.build("llama"), cases.tokenizer()
    paper = {"processing_class": tokenizer, "evaluation_protocol": "paper", "probes": 1}
    found = cases.prune(model, cases.batches("llama"), evaluation=LINES, **paper).report.evaluation
    assert found["protocol"] == paper_batches(LINES, model, tokenizer).protocol
    assert found["dense"]["perplexity"] == pytest.approx(as_the_scripts(model, tokenizer, LINES, 64)[0], rel=1e-5)
    with pytest.raises(ValueError, match="no effect where nothing is measured"):
        cases.prune(model, cases.batches("llama"), **paper)
    with pytest.raises(ValueError, match="and BertForMaskedLM is none"):
        cases.prune(cases.build("bert"), cases.batches("bert"), evaluation=LINES, **paper)


# Tasks and the card.


def test_without_the_harness_it_is_named(checkpoint, evaluated, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    code, _, err = evaluated(checkpoint, "--tasks", "arc_easy")
    assert code == 1
    assert "pip install lm-eval" in err


def test_scores_are_read_as_the_harness_writes_them():
    found = {
        "results": {
            "own": {
                "alias": "own",
                "sample_len": 9,
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "em,strict": 0.25,
                "em_stderr,strict": "N/A",
            }
        },
        "n-shot": {"own": 5},
        "n-samples": {"own": {"original": 9, "effective": 6}},
        "higher_is_better": {"own": {"acc": True}},
    }
    assert list(harness._scores(found)) == [
        harness.TaskScore("own", "acc", 0.5, 0.1, True, 5, 6),
        harness.TaskScore("own", "em (strict)", 0.25, None, None, 5, 6),
    ]


def test_a_group_has_the_questions_and_shots_of_its_tasks():
    tasks = {"a": 5, "b": 5, "c": 0}
    found = {
        "results": {name: {"acc,none": 0.5} for name in ("all", "ab", *tasks)},
        "n-shot": tasks,
        "n-samples": {name: {"original": 9, "effective": 6} for name in tasks},
        "group_subtasks": {"all": ["ab", "c"], "ab": ["a", "b"], "c": []},
    }
    scores = {score.task: (score.shots, score.samples) for score in harness._scores(found)}
    assert scores == {"all": (None, 18), "ab": (5, 12), "a": (5, 6), "b": (5, 6), "c": (0, 6)}


def test_a_card_has_to_be_there_before_anything_is_measured(evaluated, tmp_path):
    code, _, err = evaluated(tmp_path, "--data", "pydoc", "--write-card")
    assert code == 1
    assert f"there is no {tmp_path / 'README.md'}" in err


def test_a_card_that_cannot_be_written_stays_and_costs_no_result(pruned, evaluated, monkeypatch, tmp_path):
    folder = shutil.copytree(pruned[1], tmp_path / "pruned")
    before = (folder / "README.md").read_text()

    def on_a_full_disk(_, path):
        Path(path).write_text("---\n")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RepoCard, "save", on_a_full_disk)
    measure = ["--data", "pydoc", "--num-samples", "4", "--sequence-length", 16, "--write-card", "--json"]
    code, out, err = evaluated(folder, *measure)
    assert code == 1
    assert "No space left" in err
    assert json.loads(out)["perplexity"] > 1
    assert "added to the model card" not in out + err
    assert (folder / "README.md").read_text() == before
    assert not list(folder.glob(".README*"))


def test_a_loss_alone_is_no_result_and_that_is_said(tmp_path, evaluated):
    labelled.build("masked").save_pretrained(tmp_path / "masked")
    labelled.tokenizer().save_pretrained(tmp_path / "masked")
    (tmp_path / "masked" / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    code, _, err = evaluated(tmp_path / "masked", "--data", "pydoc", "--sequence-length", 16, "--write-card")
    assert code == 0
    assert "nothing was added to the card" in err


def test_a_part_of_the_questions_is_a_result_of_its_own():
    score = harness.TaskScore("arc", "acc", 0.5, 0.1, True, 0, 10)
    names = [one.metric_name for limit in (None, 10) for one in task_results([score], limit)]
    assert names == ["acc, 0-shot", "acc, 0-shot, the first 10 questions"]


def test_results_go_into_the_metadata_and_replace_their_own_alone(pruned, checkpoint, evaluated):
    _, folder = pruned
    path = folder / "README.md"
    card = ModelCard.load(path)
    theirs = EvalResult("text-generation", "their/data", "Their data", "accuracy", 0.7, metric_name="Accuracy")
    card.data.eval_results = [*card.data.eval_results, theirs]
    card.data["their_key"] = "kept"
    card.save(path)
    text, before = ModelCard.load(path).text, ModelCard.load(path).data.eval_results
    measure = ("--data", "pydoc", "--write-card", "--num-samples", "6", "--sequence-length", 16)
    for _ in range(2):  # the second time its own results are there already
        code, out, _ = evaluated(folder, *measure)
        assert code == 0
        assert f"added to the model card {path}" in out
    card = ModelCard.load(path)
    assert card.text == text
    assert card.data.their_key == "kept"
    after = card.data.eval_results
    assert all(one in after for one in [*before, theirs])
    (new,) = (one for one in after if one not in before)  # of other windows
    old = next(one for one in before if one.metric_type == "perplexity")
    assert (new.metric_type, new.metric_name) == (old.metric_type, old.metric_name)
    assert new.metric_value != old.metric_value


OWN_TASK = """
task: own_words
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
metadata:
  version: 1.0
"""


def choices_by_hand(folder, rows):
    """The choice with the largest sum of log-probabilities, given the question."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for row in rows:
        question = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
        sums = []
        for choice in row["choices"]:
            answer = tokenizer(" " + choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([question + answer])).logits[0].log_softmax(-1)
            sums.append(sum(float(logits[len(question) - 1 + i, token]) for i, token in enumerate(answer)))
        right += sums.index(max(sums)) == row["answer"]
    return right / len(rows)


@pytest.mark.slow
def test_a_task_of_ones_own_is_scored_offline_and_stands_in_the_card(pruned, checkpoint, evaluated, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install '.[lm-eval]'")
    rows = [
        {"question": f"the {word} is", "choices": ["a gradient", "quite large", "zero"], "answer": number % 3}
        for number, word in enumerate(("weight", "mask", "loss", "model", "block", "score", "probe", "budget", "row"))
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "own.yaml").write_text(OWN_TASK.format(data=tmp_path / "own.jsonl"), encoding="utf-8")
    ask = ("--tasks", "own_words", "--include-path", tmp_path, "--against", checkpoint, "--write-card")
    code, said, err = evaluated(pruned[1], *ask, "--json")
    assert code == 0, err
    scores = json.loads(said)["tasks"]
    for name, folder in (("pruned", pruned[1]), ("dense", checkpoint)):
        (score,) = scores[name]
        assert (score["task"], score["metric"], score["samples"]) == ("own_words", "acc", len(rows))
        assert score["value"] == pytest.approx(choices_by_hand(folder, rows))
        assert score["stderr"] > 0
    (entry,) = (one for one in ModelCard.load(pruned[1] / "README.md").data.eval_results if one.metric_type == "acc")
    assert entry.dataset_type == "own_words"
    assert entry.metric_value == pytest.approx(scores["pruned"][0]["value"], abs=1e-4)
    _, said, _ = evaluated(pruned[1], *ask)
    assert "±" in said
    code, _, err = evaluated(pruned[1], "--tasks", "own_wordz", "--include-path", tmp_path)
    assert code == 1
    assert "did you mean 'own_words'" in err
