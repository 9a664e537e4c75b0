"""Everything a user may name becomes the same batches each time, or an error that says what is missing."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, models, processors
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, ViTImageProcessorPil

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.data import sources
from gradprobe_hf.data.batches import from_iterable, from_rows, from_windows, shared_passages, shared_rows
from gradprobe_hf.data.text import pieces
from gradprobe_hf.data.text.pydoc_text import manual_text
from gradprobe_hf.data.text.special_tokens import special_tokens
from gradprobe_hf.data.windows import TextOptions, WindowSpec, check_length, load_batches, window_length
from gradprobe_hf.model.families import longest_text
from gradprobe_hf.model.passes.loss import summed_loss
from tests import cases
from tests.conftest import TEXT
from tests.loopback_hub import Repository

ROOT = Path(__file__).parent.parent

MODEL = cases.build("llama")
TOKENIZER = cases.tokenizer()
FROM = {"source": "a text", "protocol": "windows"}


def load(
    source,
    *,
    part="calibration",
    samples=4,
    length=16,
    batch_size=2,
    seed=0,
    tokenizer=TOKENIZER,
    model=MODEL,
    is_alone=False,
    **options,
):
    return load_batches(
        source,
        WindowSpec(samples, length, batch_size, seed, TextOptions(**options)),
        part=part,
        model=model,
        processing_class=tokenizer,
        is_alone=is_alone,
        progress=False,
    )


def test_text_that_windows_of_both_are_cut_of_is_found_wherever_they_are_cut():
    text = "".join(f"This is sentence {number}, and {number * 7919 % 997} follows. " for number in range(400))
    tokens = torch.tensor(TOKENIZER(text)["input_ids"])
    mine, other = from_windows(tokens[:4000].view(40, 100), 4, **FROM), tokens[3017:4817].view(12, 150)
    cut_otherwise = from_windows(other, 4, **FROM)
    naive = {tuple(row[start : start + 32].tolist()) for row in tokens[:4000].view(40, 100) for start in range(69)}
    runs = [tuple(row[start : start + 32].tolist()) for row in other for start in range(119)]
    wanted = sum(run in naive for run in runs) / len(runs)
    assert shared_passages(mine, cut_otherwise) == pytest.approx(wanted)
    assert 0.2 < wanted < 0.6
    assert shared_passages(mine, from_windows(tokens[4000:5500].view(15, 100), 4, **FROM)) == 0
    twice = from_windows(tokens[:4000].view(40, 100).repeat(2, 1), 4, **FROM)
    assert shared_passages(twice, cut_otherwise) == 0
    hidden = [batch | {"attention_mask": torch.zeros_like(batch["input_ids"])} for batch in cut_otherwise]
    assert shared_passages(mine, from_iterable(hidden, "masked")) == 0


def ids(batches):
    return torch.cat([batch["input_ids"] for batch in batches])


def test_windows_are_cut_shuffled_and_taken_as_the_protocol_says(text_file):
    found = load(str(text_file), samples=5, seed=3)
    tokens = torch.tensor(TOKENIZER(TEXT, add_special_tokens=False)["input_ids"])
    windows = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(3))
    assert torch.equal(ids(found), windows[order[:5]])
    assert found.tokens == 80
    assert "seed 3" in found.protocol


@pytest.mark.parametrize(
    ("model", "template", "special"),
    [
        ("llama", "<s> $A", "each begins with `<s>`"),
        ("llama", "<s> $A </s>", "each begins with `<s>`"),  # a window is cut out of a text that goes on
        ("llama", "<unk> <s> $A", "each begins with `<unk><s>`"),
        ("bert", "<s> $A </s>", "each begins with `<s>` and ends with `</s>`"),
        ("gpt2", "$A", "no special tokens"),
    ],
)
def test_windows_begin_as_the_tokenizer_begins_a_text(model, template, special, text_file):
    tokenizer = cases.tokenizer(template)
    found = load(str(text_file), tokenizer=tokenizer, model=cases.build(model), samples=5)
    assert special in found.protocol
    assert ids(found).shape == (5, 16)
    # A byte is a token here, so that the tokenizer itself says of each piece of the text what its window is.
    without_end = template if model == "bert" else template.replace(" </s>", "")
    own = 16 - len(without_end.split()) + 1
    pieces = [TEXT[at : at + own] for at in range(0, len(TEXT) - own + 1, own)]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[:5]
    assert ids(found).tolist() == cases.tokenizer(without_end)([pieces[i] for i in order])["input_ids"]
    plain = load(str(text_file), tokenizer=tokenizer, model=cases.build(model), samples=5, add_special_tokens=False)
    assert "no special tokens" in plain.protocol
    assert plain.fingerprint == load(str(text_file), samples=5).fingerprint


def test_all_but_the_special_tokens_of_a_window_are_predicted(text_file):
    model = cases.build("llama", torch.float64)
    for template, special in (("<s> $A", 1), ("<unk> <s> $A", 2)):
        found = load(str(text_file), tokenizer=cases.tokenizer(template), model=model)
        total = 0.0
        for window in ids(found):
            log_probabilities = model(input_ids=window[None]).logits[0].log_softmax(-1)
            total -= sum(log_probabilities[t - 1, window[t]].item() for t in range(special, 16))
        loss, terms = map(sum, zip(*(summed_loss(model, batch) for batch in found), strict=True))
        assert int(terms) == 4 * (16 - special)
        assert loss.item() == pytest.approx(total, rel=1e-9)


def test_a_tokenizer_whose_special_tokens_cannot_be_told_is_refused(text_file):
    class Odd:
        def __call__(self, text, add_special_tokens=True, **options):
            return {"input_ids": [1, 2] if add_special_tokens else [3] * len(text)}

        def convert_ids_to_tokens(self, ids):
            return list(map(str, ids))

    with pytest.raises(ValueError, match=r"Odd makes \[1, 2\] of 'a', and \[3\] without.*add_special_tokens=False"):
        load(str(text_file), tokenizer=Odd())
    assert (ids(load(str(text_file), tokenizer=Odd(), add_special_tokens=False)) == 3).all()


def test_special_tokens_are_told_by_a_text_that_the_tokenizer_knows():
    """Of DNA: of "a" it makes nothing, which is found anywhere, and windows ended with all it puts around a text."""
    vocabulary = {"<s>": 0, "</s>": 1, "A": 2, "C": 3, "G": 4, "T": 5}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    found = special_tokens(tokenizer, cases.build("bert"))
    assert (found.before, found.after) == ((0,), (1,))
    assert special_tokens(tokenizer, cases.build("llama")).before == (0,)


def test_every_kind_of_text_gives_the_same_windows(tmp_path, text_file):
    wanted = load(str(text_file)).fingerprint
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    Dataset.from_dict({"text": [TEXT]}).to_parquet(tmp_path / "t.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    for source in (
        str(tmp_path / "t.jsonl"),
        str(tmp_path / "t.parquet"),
        str(folder),
        [TEXT],
        Dataset.from_dict({"body": [TEXT]}),
    ):
        assert load(source).fingerprint == wanted


def test_the_seed_draws_the_windows_and_evaluation_has_its_own(text_file):
    name = str(text_file)
    assert load(name, seed=1).fingerprint == load(name, seed=1).fingerprint != load(name, seed=2).fingerprint
    assert load(name, part="evaluation", seed=1).fingerprint == load(name, part="evaluation", seed=2).fingerprint


def test_the_fingerprint_is_of_the_tokens_not_of_the_batches(text_file):
    assert load(str(text_file), batch_size=1).fingerprint == load(str(text_file), batch_size=4).fingerprint


def test_a_stream_is_read_only_as_far_as_needed(tmp_path, monkeypatch, text_file):
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", 1)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(f"line {i} of a long file" for i in range(500)))
    found = load(str(lines), samples=3)
    assert ids(found).shape == (3, 16)
    assert found.fingerprint == load(str(lines), samples=3).fingerprint


def test_windows_of_a_stream_are_of_rows_that_stand_together(tmp_path, monkeypatch):
    """A paragraph is a row in many data sets, WikiText among them."""
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", 1)
    texts, path = [f"{number:04} so" for number in range(3000)], tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = load(str(path), samples=4, length=32)
    windows = [TOKENIZER.decode(row) for row in ids(found)]
    assert all(window.strip() in "\n\n".join(texts) for window in windows)
    assert len({window[:4] for window in windows}) == 4
    assert found.fingerprint == load(str(path), samples=4, length=32).fingerprint
    assert "each the beginning of one of" in found.protocol
    assert "of rows drawn from a stream" in found.protocol
    with monkeypatch.context() as short:
        short.setattr(sources, "STREAMED_FROM_BYTES", 2**30)
        whole = load(str(path), samples=100, length=32)
    read_to_its_end = load(str(path), samples=100, length=32)
    assert read_to_its_end.fingerprint == whole.fingerprint, "it has less than what pieces are drawn of"


@pytest.mark.parametrize("transformed", [False, True])
def test_a_large_data_set_is_read_only_as_far_as_needed(transformed, monkeypatch):
    """As the package would read it, if it had opened it: in parts of rows that stand together."""
    texts, read = [f"{number:05} so" for number in range(30_000)], []
    rows = Dataset.from_dict({"text": texts})
    whole = load(rows, samples=4, length=32)
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", 2**18)
    monkeypatch.setattr(sources, "PIECE_BYTES", 2**10)
    few = load(rows.select(range(0, 3_000, 2)), samples=4, length=32)
    assert "parts of the rows" not in few.protocol, "the table is large, and what was selected is not"

    class Watching(Dataset):
        def __getitem__(self, number):
            read.append(number)
            return super().__getitem__(number)

        def __iter__(self):
            return (self[number] for number in range(len(self)))

    watched = Watching(rows.data, rows.info, rows.split)
    if transformed:
        watched.set_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    found = load(watched, samples=4, length=32)
    assert len(read) < 3_000
    assert max(read) > 10_000, "not of its beginning alone"
    windows = [TOKENIZER.decode(row).strip() for row in ids(found)]
    joined = "\n\n".join(texts)
    assert all(window in (joined.upper() if transformed else joined) for window in windows)
    assert "(parts of the rows drawn; documents separated by a blank line" in found.protocol
    assert "parts of the rows" not in whole.protocol
    assert found.fingerprint == load(watched, samples=4, length=32).fingerprint
    assert found.fingerprint != load(watched, samples=4, length=32, seed=1).fingerprint


def test_a_transform_that_makes_model_inputs_is_read_as_they_are():
    """What is stored has other columns than a row of it."""
    texts = [f"text number {number}" for number in range(6)]
    tokenised = Dataset.from_list([dict(TOKENIZER(text)) for text in texts])
    made = Dataset.from_dict({"text": texts, "number": list(range(6))})
    made.set_transform(lambda batch: dict(TOKENIZER(batch["text"])))
    found, expected = load(made, samples=4), load(tokenised, samples=4)
    assert found.fingerprint == expected.fingerprint
    assert found.protocol == expected.protocol


def test_a_large_data_set_of_little_text_is_read_in_its_order(monkeypatch):
    rows = Dataset.from_dict({"text": [f"{number:05} so" for number in range(300)]})
    whole = load(rows, samples=16, length=32)
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", 1)
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    assert load(rows, samples=16, length=32).fingerprint == whole.fingerprint


def test_too_little_text_says_how_much_there_is_and_how_much_is_needed():
    with pytest.raises(ValueError, match=r"holds 22 tokens.*1 full windows of 16; 4 windows need 64"):
        load(["only twenty-two letters"[:22]])
    with pytest.raises(ValueError, match="there is no text in 3 texts"):
        load([""] * 3)
    with pytest.raises(ValueError, match="there is no text in 2 texts, only white space"):
        load([" \n" * 100, "\t"])


def test_pydoc_is_there_and_its_parts_share_no_paragraph():
    parts = {part: set(manual_text(part).split("\n\n")) for part in ("calibration", "evaluation")}
    assert not parts["calibration"] & parts["evaluation"]
    assert all(len("\n\n".join(text)) > 40_000 for text in parts.values())
    calibration, evaluation = load("pydoc"), load("pydoc", part="evaluation")
    assert shared_rows(calibration, evaluation) == 0
    assert shared_rows(calibration, calibration) == 4


@pytest.mark.parametrize("border", ["\n", " ", ""])
def test_of_a_large_text_pieces_are_drawn(border, monkeypatch):
    """It would take minutes to tokenise whole, and gigabytes."""
    monkeypatch.setattr(pieces, "LARGEST_TEXT", 20_000)
    text, read = border.join(f"{number:06}" for number in range(5000)), []

    class Watching(type(TOKENIZER)):
        def __call__(self, text, **asked):
            read.extend([text] if isinstance(text, str) else text)
            return super().__call__(text, **asked)

    watching = Watching(tokenizer_object=TOKENIZER.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    found = load([text], tokenizer=watching)
    drawn = [one for one in read if one in text]
    assert len(drawn) == 4
    assert all(8 * 16 - 1 <= len(piece) <= 2 * 8 * 16 for piece in drawn)
    windows = ids(found)
    assert {TOKENIZER.decode(row) for row in windows} == {piece[:16] for piece in drawn}, "each inside of a piece"
    assert len({tuple(row.tolist()) for row in windows}) == 4
    assert re.search(r"each the beginning of one of \d+ pieces of the text \(no special tokens\)", found.protocol)
    assert load([text], tokenizer=watching).fingerprint == found.fingerprint
    assert load([text], tokenizer=watching, seed=1).fingerprint != found.fingerprint
    assert "pieces" not in load([text], samples=200).protocol, "it takes a good part of it"


@pytest.mark.parametrize(("separator", "between"), [(None, "\n\n"), ("eos", "</s>")])
def test_pieces_of_a_large_text_go_on_over_the_borders_of_short_documents(separator, between, monkeypatch):
    """Of a data set with a line in each row, lines in a random order are text that nobody writes."""
    monkeypatch.setattr(pieces, "LARGEST_TEXT", 1_000)
    texts = [f"{number:04} so" for number in range(6000)]
    found = load(texts, document_separator=separator, length=32)
    assert "pieces of the text" in found.protocol
    for row in ids(found):
        assert TOKENIZER.decode(row).strip() in between.join(texts)
        assert between in TOKENIZER.decode(row)


def test_images_and_recordings_that_are_in_both_are_counted():
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    one, other = ([{"labels": torch.zeros(len(part)), "pixel_values": part}] for part in (images[:4], images[2:]))
    assert shared_rows(from_iterable(one, "one"), from_iterable(other, "other")) == 2
    heard = torch.rand(2, 8, generator=torch.Generator().manual_seed(2))
    longer = torch.cat([heard, torch.zeros(2, 3)], 1)  # as beside a longer one
    masks = [torch.ones(2, 8), torch.cat([torch.ones(2, 8), torch.zeros(2, 3)], 1)]
    one, other = ([{"input_values": v, "attention_mask": m}] for v, m in zip((heard, longer), masks, strict=True))
    assert shared_rows(from_iterable(one, "one"), from_iterable(other, "other")) == 2


def test_the_model_writes_its_own_text():
    state = torch.random.get_rng_state()
    found = load("self", samples=5, length=12)
    assert ids(found).shape == (5, 12)
    assert (ids(found)[:, 0] == 256).all()  # the beginning-of-text token
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (
        found.fingerprint
        == load("self", samples=5, length=12).fingerprint
        != load("self", samples=5, length=12, seed=1).fingerprint
    )
    with pytest.raises(ValueError, match="causal language model"):
        load("self", model=cases.build("bert"))


def test_tokenised_rows_are_padded_and_masked():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]})
    found = load(rows, samples=4)
    assert found.tokens == 11
    for batch in found:
        assert ((batch["input_ids"] == 258) == (batch["attention_mask"] == 0)).all()
    with pytest.raises(ValueError, match="4 tokenised rows and 9 were asked for"):
        load(rows, samples=9)


def test_the_text_that_is_named_is_read_though_token_ids_stand_beside_it():
    rows = Dataset.from_dict({"input_ids": [[7] * 40] * 4, "text": ["some words of a text that is long " * 4] * 4})
    named = load(rows, text_column="text")
    assert not any((batch["input_ids"] == 7).any() for batch in named)
    assert all((batch["input_ids"] == 7).any() for batch in load(rows))


def test_rows_with_types_of_tokens_go_with_others():
    pair = {"input_ids": torch.arange(3), "token_type_ids": torch.ones(3, dtype=torch.long)}
    mixed = from_rows([pair, {"input_ids": torch.arange(4)}], 2, 0, source="x", protocol="y")
    assert mixed.items[0]["token_type_ids"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]


def test_a_stream_of_one_s_own_is_mixed_by_the_seed():
    rows = Dataset.from_dict({"text": [f"document number {number}" for number in range(200)]}).to_iterable_dataset()
    found = [load(rows, seed=seed, packing=False, length=40) for seed in (0, 1, 0)]
    assert found[0].fingerprint == found[2].fingerprint != found[1].fingerprint


def test_token_ids_alone_are_rows():
    found = load([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], samples=2)
    assert found.tokens == 5
    assert "2 tokenised rows" in found.protocol


@pytest.mark.parametrize("labelled", [False, True])
def test_tokenised_rows_count_where_trl_says_so(labelled, caplog):
    """Prompts are no part of its loss, and were all of ours."""
    columns = {
        "input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]],
        "completion_mask": [[0, 0, 1, 1], [0, 1, 1, 1]],
        "assistant_masks": [[1, 1, 1, 1], [0, 0, 1, 1]],
    }
    if labelled:
        columns["labels"] = [[1, 2, 3, -100], [5, 6, 7, 8]]
    found = load(Dataset.from_dict(columns), samples=2)
    pairs = [pair for one in found for pair in zip(one["input_ids"].tolist(), one["labels"].tolist(), strict=True)]
    labels = {ids[0]: row for ids, row in pairs}
    assert labels == {1: [-100, -100, 3, -100 if labelled else 4], 5: [-100, -100, 7, 8]}
    assert not caplog.text
    load(Dataset.from_dict({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 0]]}), samples=1)
    assert "has position_ids, as packed rows do, which is not read: each row is one text" in caplog.text


@pytest.mark.parametrize("name", ["loss_mask", "assistant_mask", "response_mask", "label_ids", "target"])
def test_what_counts_by_another_name_is_no_column_to_leave_out(name):
    """All tokens counted, without a word."""
    columns = {"input_ids": [[1, 2, 3, 4]] * 2, name: [[0, 0, 1, 1]] * 2}
    with pytest.raises(ValueError, match=f"rows have '{name}', a value for each token, which is not read"):
        load(Dataset.from_dict(columns), samples=2)
    labelled = load(Dataset.from_dict(columns | {"labels": [[-100, -100, 3, 4]] * 2}), samples=2)
    assert labelled.samples == 2
    if name.endswith("mask"):
        with pytest.raises(ValueError, match=f"rows have '{name}', a value for each token, which is not read"):
            load(Dataset.from_dict(columns | {"labels": [[1, 2, 3, 4]] * 2}), samples=2)
    assert load(Dataset.from_dict(columns | {name: ["a text"] * 2}), samples=2).samples == 2


@pytest.mark.parametrize("name", ["labels", "attention_mask", "completion_mask"])
def test_values_of_another_length_than_their_row_are_refused(name):
    """The padding of a batch hid it: each counted for another token than its own."""
    rows = {"input_ids": [[1, 2, 3, 4], [5, 6, 7]], name: [[1, 1, 1], [1, 1, 1, 1]]}
    with pytest.raises(ValueError, match=rf"a row has \d input_ids and \d {name}: give one for each token"):
        load(Dataset.from_dict(rows), samples=2)


def test_rows_in_which_no_token_counts_are_told(caplog):
    labels = [[-100] * 4] * 3 + [[1, 2, 3, 4]]
    found = load(Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 4, "labels": labels}), samples=4)
    assert "; in 3 of 4 rows no token counts" in found.protocol
    assert "in 3 of 4 rows no token counts in the loss, and in all together 3 do" in caplog.text


@pytest.mark.parametrize("length", [4, 5])
def test_token_ids_with_a_dimension_too_many_are_refused(length):
    """As a tokenizer with return_tensors makes them: methods without a loss pruned by them, and far worse."""
    rows = Dataset.from_dict({"input_ids": [[[1, 2, 3, 4]], [[1, 2, 3, 4, 5][:length]]]})
    with pytest.raises(ValueError, match=r"have the shape \[1, \d\]: leave out return_tensors"):
        load(rows, samples=2)
    deep = [{"input_ids": torch.ones(2, 1, length, dtype=torch.long)}]
    for options in ({"score": "wanda"}, {"update": "sparsegpt"}, {}):
        with pytest.raises(ValueError, match=rf"got torch.int64 \(2, 1, {length}\)\. Leave out return_tensors"):
            cases.prune(cases.build("llama"), deep, **options)


def test_the_beginning_of_a_stream_is_read_without_filling_its_buffer():
    read = []

    def counted():
        for number in range(5000):
            read.append(number)
            yield {"text": f"document {number} of a stream"}

    rows = IterableDataset.from_generator(counted)
    load(rows, samples=4, packing=False, length=16)
    assert len(read) < 3 * 5000, "what looks at the beginning alone fills no buffer: there were five"


def test_tokenised_rows_of_a_stream_are_drawn_from_more_than_its_beginning(tmp_path, monkeypatch):
    rows = Dataset.from_dict({"input_ids": [[0, number % 250, number // 250] for number in range(5000)]})
    found = load(rows.to_iterable_dataset(), samples=16, length=3)
    assert int(ids(found)[:, 2].max()) >= 10
    assert "drawn with seed 0 from 10,000 rows at a time of a stream" in found.protocol
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", 1)
    rows.to_json(tmp_path / "rows.jsonl")
    opened = sources.open_source(str(tmp_path / "rows.jsonl"), "calibration", 0)
    assert sources.shuffled(opened, 0)[0] is opened.rows, "it was shuffled when it was opened"


def test_a_loader_that_shuffles_gives_the_same_batches_twice():
    loader = DataLoader([{"input_ids": torch.tensor([i, i + 1])} for i in range(8)], batch_size=2, shuffle=True)
    found = load(loader)
    assert torch.equal(ids(found), ids(found))
    assert found.samples == 8
    assert found.tokens == 16


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("/no/such/file.txt", ValueError, "no such file or folder"),
        ("no such thing!", ValueError, "no such file or folder"),
        ("somebody/some-dataset", OSError, "cannot load the dataset 'somebody/some-dataset'.*pydoc"),
        (7, ValueError, "got int"),
        ([1, 2], ValueError, "a list of texts must hold strings, got int"),
        ([], ValueError, "holds no batches"),
        (
            Dataset.from_list([{"text": "one"}]).to_pandas(),
            ValueError,
            r"give a data set of it, Dataset\.from_pandas\(f",
        ),
        (iter([{"input_ids": torch.ones(1, 2)}]), ValueError, "re-iterable"),
        ([{"input_ids": [[1, 2]]}], ValueError, "mapping of tensors"),
        ([(torch.ones(1, 2), torch.ones(1))], ValueError, "list of batches must hold dicts of tensors"),
        ("", ValueError, "which is empty"),
        ("texts/train.docx", ValueError, "no such file or folder"),
        ("tests/no-such-folder", ValueError, "no such file or folder"),  # the folder `tests` is here
        ({}, ValueError, "must name its texts"),
        ({"pydoc": 0}, ValueError, "the weight of 'pydoc' must be a number > 0, got 0"),
        ({"pydoc": 1, "self": 1e-9}, ValueError, "of 4 samples none would be of 'self'"),
    ],
)
def test_what_cannot_be_read_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        load(source)


HUB_SCRIPT = """
import datasets.config
from gradprobe_hf.data.windows import WindowSpec, load_batches
from tests import cases
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.1  # it waits five seconds wherever a stream is not read to its end
for part, source in (("calibration", "me/prose"), ("evaluation", "me/prose"), ("calibration", "me/prose:default:test")):
    found = load_batches(
        source, WindowSpec(2, 16, 2), part=part, model=cases.build("llama"), processing_class=cases.tokenizer()
    )
    text = cases.tokenizer().decode(found.items[0]["input_ids"][0])
    print(found.source, found.dataset_id, "TRAIN" if "RAIN" in text else "TEST")
"""


def test_a_hub_dataset_by_id_config_and_split(hub, user):
    def parquet(word):
        stored = io.BytesIO()
        Dataset.from_dict({"text": [f"{word} " * 30] * 3}).to_parquet(stored)
        return stored.getvalue()

    files = {f"data/{split}-00000-of-00001.parquet": parquet(split.upper()) for split in ("train", "test")}
    hub.datasets["me/prose"] = Repository(revisions={"main": files | {"README.md": b"---\nlicense: mit\n---\n"}})
    ran = user.run(HUB_SCRIPT, cwd=ROOT)
    assert hub.unknown == []
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "me/prose:train me/prose TRAIN",
        "me/prose:test me/prose TEST",
        "me/prose:default:test me/prose TEST",
    ]


def test_a_folder_of_several_formats_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"\.jsonl, \.txt"):
        load(str(tmp_path))
    (tmp_path / "c.doc").write_text("a")
    with pytest.raises(ValueError, match=r"it holds \.doc"):
        load(str(tmp_path / "c.doc"))


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"is empty|cannot be read|there is no text"):
        load(str(tmp_path / name))


def test_columns_without_one_text_are_named():
    with pytest.raises(ValueError, match="its columns are 'question', 'answer'"):
        load(Dataset.from_dict({"question": ["a"], "answer": ["b"]}))


def test_windows_the_model_has_no_positions_for_are_refused(text_file):
    with pytest.raises(ValueError, match=r"sequence_length=65 is more than the 64 positions.*pass sequence_length=64"):
        load(str(text_file), length=65)


def test_text_without_a_tokenizer_is_refused(text_file):
    with pytest.raises(ValueError, match="hand it over as processing_class"):
        load(str(text_file), tokenizer=None)


def test_text_for_a_model_of_images_is_refused(text_file):
    processor = ViTImageProcessorPil()
    with pytest.raises(ValueError, match=r"does not read plain text, but images: give a data set with them"):
        load_batches(
            text_file, WindowSpec(4, 12, 2), part="evaluation", model=cases.build("vit"), processing_class=processor
        )


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta", "Camembert", "Data2VecText", "MPNet", "Esm", "GPT2"])
def test_the_longest_text_is_the_longest_that_the_model_reads(kind):
    """RoBERTa and its like have two positions fewer than their configuration tells."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, max_position_embeddings=20, pad_token_id=1, bos_token_id=0, eos_token_id=2, **sizes
    )
    model = getattr(transformers, f"{kind}Model")(config).eval()
    longest = window_length(None, model)
    assert longest == longest_text(model)
    tokens = torch.full((1, longest + 1), 5)
    model(input_ids=tokens[:, :longest])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=tokens)
    with pytest.raises(ValueError, match=f"sequence_length={longest + 1} is more than the {longest} positions"):
        check_length(model, longest + 1)


@pytest.mark.parametrize(
    "option",
    [{"text_template": "{a}"}, {"packing": False}, {"add_special_tokens": False}, {"text_column": "a"}],
    ids=str,
)
def test_text_options_beside_batches_alone_are_refused(option, text_file):
    batches = [dict(batch) for batch in load(str(text_file))]
    model, config = cases.build("llama"), GradProbeConfig(preset="fast", num_samples=4, sequence_length=16, **option)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}={re.escape(repr(value))} has no effect here.*Leave {name} unset"):
        prune_pretrained(model, config, calibration=batches, evaluation=batches, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_text_options_of_an_evaluation_text_are_no_error_beside_batches(text_file):
    batches = [dict(batch) for batch in load(str(text_file))]
    config = GradProbeConfig(preset="fast", sequence_length=16, evaluation_samples=4, packing=False)
    result = prune_pretrained(
        cases.build("llama"),
        config,
        calibration=batches,
        evaluation=TEXT.split(", "),
        processing_class=TOKENIZER,
        progress=False,
    )
    assert result.report.evaluation is not None


@pytest.mark.parametrize("argument", ["calibration", "evaluation"])
@pytest.mark.parametrize("text", [TEXT, "A line.\nAnother."], ids=["long", "lines"])
def test_a_text_in_place_of_its_name_is_told_how_texts_are_given(text, argument):
    texts = {"calibration": [TEXT], argument: text}
    with pytest.raises(FileNotFoundError, match=r"texts themselves are a list of them\.$") as error:
        prune_pretrained(cases.build("llama"), processing_class=TOKENIZER, progress=False, **texts)
    assert len(str(error.value)) < 500


def test_a_row_without_a_token_is_refused():
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="a row has an attention_mask of zeros alone"):
        prune_pretrained(cases.build("llama"), calibration=[batch], progress=False)
