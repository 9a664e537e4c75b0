"""Data of the user's own in forms that were read otherwise than it means, without a word."""

from __future__ import annotations

import gzip
import json
import logging
from contextlib import nullcontext

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from transformers import BartConfig, BartForCausalLM

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.data.batch_checks import check_batches
from gradprobe_hf.data.batches import SHARED, from_iterable, share_in_sketch, shared_passages, sketch, token_count
from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.text.chat import ChatTemplate
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.tasks.columns import LabelNames
from gradprobe_hf.tasks.conversation import Chat
from gradprobe_hf.tasks.table import task_of_class
from tests import cases, labelled
from tests.chats import CHAT, CHATML, LONG, chatting
from tests.test_calibration import load

# As LLaVA's: of a text it renders nothing.
PARTS_ALONE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %} {% endfor %}"
)


def test_a_template_that_reads_parts_alone_is_given_texts_as_parts():
    parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in CHAT]
    template = ChatTemplate.of(chatting(PARTS_ALONE), "chats")
    found, wanted = (template.render(Chat(chat), assistant_only=False) for chat in (CHAT, parts))
    assert found.text == wanted.text
    assert all(one["content"] in found.text for one in CHAT)


def test_a_template_that_says_nothing_of_its_messages_is_refused():
    for template in ("{{ messages | length }}", "{% for m in messages %}{{ m.role }}{% endfor %}"):
        with pytest.raises(ValueError, match="renders nothing of what these messages say"):
            ChatTemplate.of(chatting(template), "chats").render(Chat(CHAT), assistant_only=False)
    upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"  # nothing as it is, and yet all of it
    assert ChatTemplate.of(chatting(upper), "chats").render(Chat(CHAT), assistant_only=False).text.isupper()


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio"])
def test_media_inside_of_messages_are_no_text(kind):
    chat = [{"role": "user", "content": [{"type": kind, kind: "x"}, {"type": "text", "text": "What is it?"}]}, CHAT[-1]]
    reads = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    for template in (reads, CHATML):
        with pytest.raises(ValueError, match=f"a part of type '{kind}'"):
            ChatTemplate.of(chatting(template), "chats").render(Chat(chat), assistant_only=False)


@pytest.mark.parametrize("names", [["labels"], ["label", "labels"]])
def test_labels_that_are_the_model_s_own_numbers_are_not_numbered_again(names):
    model, tokenizer = labelled.build("bert"), labelled.tokenizer()
    order = list(reversed(model.config.id2label.values()))
    stored = [0, 1, 2, 1]
    own = [model.config.label2id[order[number]] for number in stored]
    rows = [tokenizer(text) for text in labelled.texts(4)]
    columns = {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}
    features = {name: Sequence(Value("int64")) for name in columns} | {"labels": Value("int64")}
    values = {"labels": own}
    if "label" in names:
        features["label"], values["label"] = ClassLabel(names=order), stored
    data = Dataset.from_dict(columns | values, features=Features(features))
    task = task_of_class(type(model).__name__, False)
    spec = WindowSpec(4, 24, seed=0, batch_size=1)
    given = {"part": "calibration", "model": model, "processing_class": tokenizer, "progress": False}
    found = load_batches(data, spec, task=TaskOptions(task), **given)
    by_text = {tuple(row["input_ids"]): label for row, label in zip(rows, own, strict=True)}
    for batch in found:
        assert int(batch["labels"]) == by_text[tuple(batch["input_ids"][0].tolist())]


@pytest.mark.parametrize(
    ("ids", "true"), [({"true": 0, "false": 1}, 0), ({"False": 0, "True": 1}, 1), ({"LABEL_0": 0, "LABEL_1": 1}, 1)]
)
def test_true_and_false_go_by_their_names(ids, true):
    """A file of rows makes truth values of them, which are 1 and 0 to Python."""
    names = LabelNames(ids, 2)
    assert [names.number(value, "a row") for value in (True, False)] == [true, 1 - true]


def test_what_is_true_has_to_be_told():
    with pytest.raises(
        ValueError, match=r"the model calls its labels .*'refuted'.*: which of them is true is not told"
    ):
        LabelNames({"supported": 0, "refuted": 1}, 2).number(True, "a row")


@pytest.mark.parametrize(
    ("names", "values", "is_refused"),
    [
        (["1", "0"], [0, 1], True),
        (["0", "1"], [0, 1], False),
        (["1 star", "2 stars", "3 stars"], [1, 2], True),
        (["1 star", "2 stars", "3 stars"], [0, 1, 2], False),
        (["1 star", "2 stars", "3 stars"], ["1", "2"], False),
        (["bad", "good"], [0, 1], False),
    ],
)
def test_numbers_that_are_names_of_other_labels_are_refused(names, values, is_refused):
    found = LabelNames({name: number for number, name in enumerate(names)}, len(names))
    with pytest.raises(ValueError, match=r"the label [01] may be the model's label") if is_refused else nullcontext():
        found.check_numbers(values, "a file")


def test_chats_of_one_prompt_share_no_text():
    def chats(first):
        rows = torch.randint(100, 256, (16, 64), generator=torch.Generator().manual_seed(first))
        rows[:, 10:50] = torch.arange(40)  # what all are asked
        return from_iterable([{"input_ids": rows}], "chats")

    one, other = chats(1), chats(2)
    single = from_iterable([{"input_ids": one.items[0]["input_ids"][:1]}], "a chat")
    assert shared_passages(one, other) < SHARED, "a prompt and one more token may be the same"
    assert shared_passages(single, other) < SHARED
    assert share_in_sketch(sketch(single), other) < SHARED
    assert shared_passages(one, one) > 0.1
    alone = from_iterable([{"input_ids": rows} for rows in torch.randint(256, (4, 1, 64))], "texts")
    twice = from_iterable([*alone.items, *alone.items], "the same again")
    assert shared_passages(alone, twice) == share_in_sketch(sketch(alone), twice) == 1, "which hides nothing"


def test_a_loader_that_fills_one_tensor_again_and_again_is_read_as_it_goes():
    class Reusing:
        def __iter__(self):
            whole = torch.zeros(1, 4, dtype=torch.long)
            for number in range(3):
                whole.fill_(number)
                yield {"input_ids": whole}

    assert [int(batch["input_ids"][0, 0]) for batch in from_iterable(Reusing(), "a loader")] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("labels", [True, False])
def test_padding_under_a_mask_of_pairs_is_none_of_the_text(kind, labels):
    """Wanda's norms, least squares and token counts took it for text."""
    torch.manual_seed(0)
    ids, lengths = torch.randint(1, 256, (4, 10)), (6, 10, 4, 7)
    there = torch.arange(10) < torch.tensor(lengths)[:, None]
    ids = ids.where(there, 0)
    pairs = torch.ones(10, 10).tril().bool() & there[:, None, None]
    of_pairs = (
        pairs if kind == "bool" else torch.zeros(4, 1, 10, 10).masked_fill(~pairs, torch.finfo(torch.float32).min)
    )
    beside = {"labels": ids.where(there, -100)} if labels else {}
    model = cases.build("llama")
    flat, deep = ({"input_ids": ids, "attention_mask": mask, **beside} for mask in (there.long(), of_pairs))
    assert token_count(deep) == token_count(flat) == sum(lengths)
    for found, wanted in zip(summed_loss(model, deep), summed_loss(model, flat), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    for options in ({"score": "wanda"}, {"score": "wanda", "update": "least_squares"}):
        found, wanted = (cases.prune(model, [batch], sparsity=0.5, **options).masks for batch in (deep, flat))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"shift_labels": torch.ones(1, 4).long()}, "'shift_labels'"),
        ({"labels": torch.ones(1, 4).long(), "shift_labels": torch.ones(1, 4).long()}, "'shift_labels'"),
        ({"labels": torch.tensor([[1, 2, 3, 4]]), "loss_mask": torch.tensor([[0, 0, 1, 1]])}, "'loss_mask'"),
        (
            {"labels": torch.tensor([[1, 2, 3, 4]]), "completion_mask": torch.tensor([[0, 0, 1, 1]])},
            "'completion_mask'",
        ),
        ({"labels": torch.tensor([[2, 3, 4, 9]])}, "shifted by one, and LlamaForCausalLM shifts labels by itself"),
        ({"labels": torch.tensor([[-100, 3, 4, -100]])}, "shifted by one"),
    ],
    ids=str,
)
def test_what_counts_is_what_the_model_reads(beside, said):
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), **beside}
    with pytest.raises(ValueError, match=f"calibration: .*{said}"):
        cases.prune(cases.build("llama"), [batch])


def test_a_decoder_that_compares_labels_as_they_are_is_given_those_of_other_models():
    """Its own, the next tokens, were shifted once more: a perplexity of 1328 where it had 2.4."""
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    torch.manual_seed(0)
    model = BartForCausalLM(BartConfig(vocab_size=64, is_decoder=True, is_encoder_decoder=False, **sizes)).eval()
    ids = torch.randint(3, 60, (1, 8))
    batch = {"input_ids": ids, "labels": torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)}
    with pytest.raises(ValueError, match="shifted by one, and BartForCausalLM is given labels here as all others are"):
        check_batches(model, from_iterable([batch], "own"), "calibration", needs_loss=True)
    total, terms = summed_loss(model, {"input_ids": ids, "labels": ids})
    torch.testing.assert_close(total / terms, model(**batch).loss)
    embedded = {"inputs_embeds": model.get_input_embeddings()(ids), "labels": batch["labels"]}
    total, terms = summed_loss(model, embedded)  # no ids that could be shifted: its own loss
    torch.testing.assert_close(total / terms, model(**embedded).loss)
    assert terms == 7
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(model(**batch).loss, torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))


def test_masks_that_labels_follow_may_be_beside_them():
    """As TRL's collators leave them there; and a text that says one word only is no shifted one."""
    labels = torch.tensor([[-100, -100, 3, 4]])
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": labels, "completion_mask": (labels > 0).long()}
    same = torch.ones(1, 4).long()
    other = {"input_ids": same, "labels": same, "loss_mask": None, "target": ["a", "b"]}
    for one in (batch, {"input_ids": same, "labels": same}, other):
        assert cases.prune(cases.build("llama"), [one] * 2, sparsity=0.5).report.sparsity == 0.5


@pytest.mark.parametrize("side", ["right", "left"])
def test_runs_of_padding_without_a_mask_are_told(side, caplog):
    ids = [[*range(2, 2 + length), *[0] * (24 - length)] for length in (6, 9, 12, 24)]
    ids = [row if side == "right" else row[::-1] for row in ids]
    mask = [[int(token > 0) for token in row] for row in ids]
    with caplog.at_level(logging.WARNING):
        load(Dataset.from_dict({"input_ids": ids, "attention_mask": mask}), samples=4)
        assert "as padding does" not in caplog.text
        load(Dataset.from_dict({"input_ids": ids}), samples=4)
    assert "3 of 4 rows of a Dataset end or begin with a run of the token 0, as padding does" in caplog.text


def test_compressed_files_of_a_folder_are_not_left_out(tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "of the test " * 40}))
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "of the training " * 40}))
    with pytest.raises(ValueError, match=r"holds train\.jsonl\.gz, which is compressed and would be left out"):
        load(str(tmp_path))
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "of the training " * 40}))  # as `gunzip -k` does
    assert load(str(tmp_path), samples=2).samples == 2


def test_columns_of_a_formatted_stream_are_plain(text_file):
    rows = Dataset.from_dict({"text": ["one day " * 30] * 4, "n": [1, 2, 3, 4]})
    how = {"samples": 2, "text_template": "{n}: {text}"}
    plain, stream = (load(rows.to_iterable_dataset().with_format(kind), **how) for kind in (None, "torch"))
    assert plain.fingerprint == stream.fingerprint


def test_a_stream_that_forgot_its_classes_says_so(caplog):
    model, tokenizer = labelled.build("bert"), labelled.tokenizer()
    names = list(model.config.id2label.values())
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    stored = Dataset.from_dict({"text": labelled.texts(6), "label": [0, 1, 2] * 2}, features=features)
    config = GradProbeConfig(sparsity=0.5, score="wanda", num_samples=4, batch_size=2)
    given = {"processing_class": tokenizer, "evaluation": False, "apply": False, "progress": False}
    for stream, told in ((stored.to_iterable_dataset(), False), (stored.to_iterable_dataset().map(dict), True)):
        caplog.clear()
        prune_pretrained(model, config, calibration=stream, **given)
        assert ("does not tell what its classes are called, as of a stream that was mapped" in caplog.text) == told


def test_a_column_beside_a_chat_is_no_turn_of_it():
    chat = [{"role": "assistant", "content": "Ahoy!"}, {"role": "user", "content": "Who are you?"}, CHAT[-1]]
    how = {"samples": 1, "length": 100, "packing": False, "model": LONG, "tokenizer": chatting(CHATML)}
    beside = load([{"prompt": "A pirate captain.", "messages": chat}] * 2, **how)
    assert beside.fingerprint == load([{"messages": chat}] * 2, **how).fingerprint


@pytest.mark.parametrize("prompt", ["What is it?", [{"role": "user", "content": "What is it?"}]], ids=type)
def test_a_chosen_answer_comes_with_what_it_answers(prompt):
    answer, other = ([{"role": "assistant", "content": text}] for text in ("A good answer.", "A bad one."))
    rows = [{"prompt": prompt, "chosen": answer, "rejected": other}] * 2
    how = {"samples": 1, "length": 100, "packing": False, "model": LONG, "tokenizer": chatting(CHATML)}
    found = load(rows, text_column="chosen", **how)
    whole = [{"messages": [{"role": "user", "content": "What is it?"}, *answer]}] * 2
    assert found.fingerprint == load(whole, **how).fingerprint


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "old.jsonl").write_bytes('{"text": "caf\u00e9 au lait"}\n'.encode("latin-1") * 4)
    with pytest.raises(ValueError, match=r"old\.jsonl cannot be read as .*Save it as UTF-8"):
        load(str(tmp_path / "old.jsonl"))


@pytest.mark.parametrize("source", [iter(["a"]), {"rows": []}], ids=["iterator", "dict"])
def test_the_paper_protocol_says_what_it_reads(source, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"the paper protocol measures on .*(texts, and got|one text)"):
        prune_pretrained(
            str(checkpoint),
            GradProbeConfig(sparsity=0.5, score="magnitude", evaluation_protocol="paper"),
            evaluation=source,
            progress=False,
        )
