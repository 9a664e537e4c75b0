"""Labels that a model would take for something else, or not at all, and rows whose padding would change their loss."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from packaging.version import Version
from PIL import Image

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.bench.subject import Subject, Workload
from gradprobe_hf.data.label_checks import check_labels
from gradprobe_hf.model.families import sample_batch
from gradprobe_hf.model.passes.loss import summed_loss
from tests import cases

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SIZES, "vocab_size": cases.VOCABULARY, "max_position_embeddings": 64}
SEQ2SEQ = {
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
}


YOLOS = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": [16, 16],
    "patch_size": 8,
    "num_detection_tokens": 4,
    "num_labels": 3,
}


def prune(model, calibration, evaluation=False, **options):
    given = {name: options.pop(name) for name in ("apply", "processing_class") if name in options}
    config = GradProbeConfig(**{"sparsity": 0.5, "num_samples": 4, **options})
    given = {"processing_class": cases.tokenizer(), "calibration": calibration, "evaluation": evaluation, **given}
    return prune_pretrained(model, config, progress=False, **given)


def seeded(cls, config):
    torch.manual_seed(0)
    return cls(config).eval()


def measured(model, rows, **options):
    """The dense loss of a report."""
    return prune(model, rows, rows, apply=False, **options).report.evaluation["dense"]


@pytest.mark.parametrize("label", [1, torch.tensor(1), torch.tensor([1])], ids=["int", "tensor", "one-element"])
@pytest.mark.parametrize(
    ("model", "inputs", "shape"),
    [
        ("vit", {"pixel_values": torch.zeros(3, 8, 8)}, r"pixel_values .*\[rows, \.\.\.\] of 4 .*\(3, 8, 8\)"),
        ("choices", {"input_ids": torch.ones(4, 6, dtype=torch.long)}, r"\[rows, choices, tokens\] of 3 .*\(4, 6\)"),
        ("bert", {"input_ids": torch.ones(1, 6, dtype=torch.long)}, "labels .* one number, 1"),
    ],
)
def test_rows_that_are_given_as_batches_are_refused(model, inputs, shape, label):
    """The items of a list are batches, and a row would only fail in the model's own code."""
    classes = {"bert": hf.BertForSequenceClassification, "choices": hf.BertForMultipleChoice}
    made = seeded(classes[model], hf.BertConfig(**BERT)) if model in classes else cases.build(model)
    given = [{**inputs, "labels": label}] * 4
    if model == "bert" and torch.is_tensor(label) and label.ndim:  # a batch of one text
        assert prune(made, given, processing_class=None).report.weights
        return
    with pytest.raises(ValueError, match=rf"calibration: .*{shape}: .*Dataset\.from_list\(rows\)"):
        prune(made, given, processing_class=None)


@pytest.mark.parametrize("labels", [torch.eye(3), torch.eye(3).long()], ids=["fractions", "whole numbers"])
def test_several_numbers_a_row_are_no_class(labels):
    made = cases.build("vit")
    made.config.problem_type = "single_label_classification"  # as transformers sets it at the first loss
    batch = {"pixel_values": torch.zeros(3, 3, 8, 8), "labels": labels}
    with pytest.raises(ValueError, match=r"the number of each row's class, \[rows\], and these are \(3, 3\).*argmax"):
        prune(made, [batch], processing_class=None)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("label_ids", "call it 'labels'"),
        ("targets", "call it 'labels'"),
        ("completion_mask", "give labels, -100 where"),
    ],
)
def test_labels_by_a_name_that_the_model_ignores_are_refused(name, remedy):
    """Every token counted instead: transformers' models take any name."""
    rows = [{**row, name: torch.ones_like(row["input_ids"])} for row in cases.batches("llama")]
    with pytest.raises(ValueError, match=f"a batch has '{name}', which LlamaForCausalLM does not take: {remedy}"):
        prune(cases.build("llama"), rows)
    labelled = [{**row, "labels": row["input_ids"]} for row in rows]  # what counts is said, and the other is ignored
    assert prune(cases.build("llama"), labelled).report.weights


class TestAnswersInATextByPosition:
    """Of extractive question answering."""

    def rows(self, start=1, end=2, **changes):
        words = cases.tokenizer()
        ids = [words(f"question {'and ' * (number % 3)}")["input_ids"] for number in range(8)]
        return [{"input_ids": one, "start_positions": start, "end_positions": end, **changes} for one in ids]

    def model(self):
        return seeded(hf.BertForQuestionAnswering, hf.BertConfig(**BERT))

    def test_rows_of_unequal_lengths_are_measured_without_padding(self):
        """The softmax over positions would run over it."""
        model, rows = self.model(), self.rows()
        own = [model(**{name: torch.tensor([value]) for name, value in row.items()}).loss for row in rows]
        for batch_size in (1, 4):
            found = measured(model, Dataset.from_list(rows), batch_size=batch_size, num_samples=8)
            assert found["loss"] == pytest.approx(torch.stack(own).mean().item(), rel=1e-5)
            assert found["terms"] == 8

    @pytest.mark.parametrize("name", ["start_positions", "end_positions"])
    @pytest.mark.parametrize("position", [-1, 50])
    def test_an_answer_that_is_not_in_the_row_is_refused(self, name, position):
        rows = Dataset.from_list(self.rows(**{name: position}))
        with pytest.raises(ValueError, match=rf"calibration: a row has {name} {position}, and \d+ tokens: the answer"):
            prune(self.model(), rows)

    def test_an_answer_in_padding_is_refused(self):
        batch = {
            "input_ids": torch.ones(1, 6, dtype=torch.long),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
            "start_positions": torch.tensor([2]),
            "end_positions": torch.tensor([4]),
        }
        with pytest.raises(ValueError, match="a row has end_positions 4, and 4 tokens"):
            prune(self.model(), [batch])

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"start_positions": None}, "a row has start_positions nothing"),
            ({"start_positions": 1.5}, "start_positions are the numbers of tokens, whole numbers, and these"),
        ],
    )
    def test_what_is_no_position_is_refused(self, changes, complaint):
        rows = self.rows()
        with pytest.raises(ValueError, match=complaint):
            prune(self.model(), Dataset.from_list([{**rows[0], **changes}, *({**row, **changes} for row in rows[1:])]))

    def test_an_end_is_missed(self):
        rows = [{name: value for name, value in row.items() if name != "end_positions"} for row in self.rows()]
        with pytest.raises(ValueError, match=r"no loss without start_positions and end_positions, and .* lacks end"):
            prune(self.model(), Dataset.from_list(rows))

    def test_one_position_a_row_may_be_a_column(self):
        rows = [{**row, "start_positions": [1], "end_positions": [50]} for row in self.rows()]
        with pytest.raises(ValueError, match="a row has end_positions 50"):
            prune(self.model(), Dataset.from_list(rows))

    def test_without_a_loss_no_position_counts(self):
        assert prune(self.model(), Dataset.from_list(self.rows(end=50)), score="wanda", apply=False).masks


@pytest.mark.parametrize("label", [float("nan"), float("inf")])
def test_what_is_no_measure_is_refused_with_its_row(label):
    """The loss of a whole batch would be no number, and nobody would know whose."""
    model = seeded(hf.BertForSequenceClassification, hf.BertConfig(**BERT, num_labels=1))
    rows = [{"text": f"row {number}", "label": 0.5} for number in range(4)]
    rows[2] = {"text": "the bad row", "label": label}
    with pytest.raises(ValueError, match=r"one label predicts a number, and a row \(.*the bad row.*has the label"):
        prune(model, rows)


def test_several_measures_of_a_row_are_read():
    config = hf.BertConfig(**BERT, num_labels=3, problem_type="regression", pad_token_id=258)
    model = seeded(hf.BertForSequenceClassification, config)
    rows = [{"text": f"row {number}", "label": [number / 8, 0.5, -1]} for number in range(8)]
    found, words = measured(model, Dataset.from_list(rows), batch_size=4, num_samples=8)["loss"], cases.tokenizer()
    own = [
        model(**words(row["text"], return_tensors="pt"), labels=torch.tensor([row["label"]])).loss.item()
        for row in rows
    ]
    assert found == pytest.approx(sum(own) / 8, rel=1e-5)
    rows[2]["label"] = [0.5, 1]
    with pytest.raises(
        ValueError, match=r"with 3 labels predicts as many numbers, and a row \(.*row 2.*\[0\.5, 1\.0\]"
    ):
        prune(model, rows)


@pytest.mark.parametrize("family", ["fnet", "convbert", "mobilebert"])
def test_rows_of_a_model_that_computes_with_padding_are_not_padded(family):
    sizes = {name: size for name, size in BERT.items() if name != "num_attention_heads" or family != "fnet"}
    narrow = {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16, "conv_kernel_size": 3}
    config = hf.AutoConfig.for_model(family, **sizes, num_labels=2, pad_token_id=258, **narrow)
    torch.manual_seed(0)
    model = hf.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    rows = Dataset.from_list([{"text": "word " * (1 + number % 3), "label": number % 2} for number in range(8)])
    losses = [measured(model, rows, batch_size=size, num_samples=8)["loss"] for size in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class TestMultipleChoice:
    def model(self):
        return seeded(hf.BertForMultipleChoice, hf.BertConfig(**BERT))

    def rows(self, choices=lambda number: 4, label=lambda number, choices: number % choices):
        words, rows = cases.tokenizer(), []
        for number in range(8):
            count = choices(number)
            ids = words([f"choice {'x' * place * number}" for place in range(count)])["input_ids"]
            rows.append({"input_ids": ids, "label": label(number, count)})
        return rows

    @pytest.mark.parametrize("choices", [lambda number: 4, lambda number: 2 + number % 2], ids=["4", "2 or 3"])
    def test_rows_as_a_tokenizer_gives_them_are_measured_as_one_by_one(self, choices):
        """With more choices than the configuration has labels, and of unequal lengths."""
        model, rows, own = self.model(), self.rows(choices), []
        for row in rows:
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in row["input_ids"]], batch_first=True)
            lengths = torch.tensor([len(one) for one in row["input_ids"]])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            label = torch.tensor([row["label"]])
            own.append(model(input_ids=ids[None], attention_mask=mask[None], labels=label).loss)
        found = measured(model, Dataset.from_list(rows), num_samples=8, batch_size=4)
        assert found["loss"] == pytest.approx(torch.stack(own).mean().item(), rel=1e-5)

    @pytest.mark.parametrize("label", [4, -1, "d"])
    def test_a_label_that_is_no_choice_is_refused(self, label):
        rows = self.rows(label=lambda *_: label)
        with pytest.raises(ValueError, match=rf"a row has the label {label!r}, and 4 choices: .* 0 to 3"):
            prune(self.model(), Dataset.from_list(rows))

    def test_a_batch_with_such_a_label_is_refused(self):
        batch = {"input_ids": torch.ones(1, 3, 5, dtype=torch.long), "labels": torch.tensor([3])}
        with pytest.raises(ValueError, match="labels hold 3, and BertForMultipleChoice predicts 0 to 2"):
            prune(self.model(), [batch])


class TestTextsToWrite:
    @pytest.mark.parametrize("padded", [[7, 8, 2, 1, 1], [7, 8, 9, 2, 1]])
    def test_labels_that_end_with_pad_tokens_are_refused(self, padded):
        config = hf.BartConfig(**SEQ2SEQ, vocab_size=64, max_position_embeddings=32, pad_token_id=1, eos_token_id=2)
        batch = {"input_ids": torch.full((2, 5), 7), "labels": torch.tensor([padded, [7, 8, 9, 9, 2]])}
        assert prune(seeded(hf.BartForConditionalGeneration, config), [batch], score="wanda", apply=False).masks
        with pytest.raises(ValueError, match=r"labels end with pad tokens \(1\), which the loss counts .* -100"):
            prune(seeded(hf.BartForConditionalGeneration, config), [batch])

    def test_a_pad_token_that_also_ends_a_text_is_none(self):
        """As a model of two halves says, whatever its decoder would by itself."""
        encoder = hf.ViTConfig(**SIZES, image_size=32, patch_size=8)
        decoder = hf.BertConfig(**SIZES, vocab_size=50, is_decoder=True, add_cross_attention=True)
        config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        config.pad_token_id = config.eos_token_id = 0
        config.decoder_start_token_id = 1
        batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])}
        assert prune(seeded(hf.VisionEncoderDecoderModel, config), [batch], apply=False).masks

    def test_a_transducer_leaves_out_pad_tokens_by_itself(self):
        encoder = {**SIZES, "num_mel_bins": 16, "subsampling_factor": 4, "subsampling_conv_channels": 8}
        config = hf.ParakeetTDTConfig(
            encoder_config=encoder, vocab_size=20, decoder_hidden_size=16, num_decoder_layers=1
        )
        config.pad_token_id, config.blank_token_id = 2, 19
        batch = {"input_features": torch.randn(2, 64, 16), "attention_mask": torch.ones(2, 64, dtype=torch.long)}
        batch |= {"labels": torch.tensor([[4, 5, 2], [4, 5, 7]])}
        batch |= {"decoder_input_ids": torch.tensor([[19, 4, 5, 2], [19, 4, 5, 7]])}
        assert prune(seeded(hf.ParakeetForTDT, config), [batch], apply=False).masks

    def test_texts_that_are_all_empty_are_refused(self):
        config = hf.BartConfig(**SEQ2SEQ, vocab_size=cases.VOCABULARY, max_position_embeddings=32)
        rows = Dataset.from_dict({"document": ["a b"] * 4, "summary": [" "] * 4})
        with pytest.raises(ValueError, match="summary: all of the 4 texts to write are empty"):
            prune(seeded(hf.BartForConditionalGeneration, config), rows)

    def test_fsmt_is_taught_with_its_labels(self):
        """By itself it would give its decoder the source."""
        vocabulary = {"langs": ["en", "de"], "src_vocab_size": cases.VOCABULARY, "tgt_vocab_size": cases.VOCABULARY}
        model = seeded(hf.FSMTForConditionalGeneration, hf.FSMTConfig(**SEQ2SEQ, **vocabulary))
        words = cases.tokenizer()
        texts = {"document": [f"row {number} ab" for number in range(4)], "summary": ["longer than that"] * 4}
        own = []
        for source, target in zip(*texts.values(), strict=True):
            labels = torch.tensor([words(target)["input_ids"]])
            begun = torch.cat([labels[:, -1:], labels[:, :-1]], 1)
            ids = torch.tensor([words(source)["input_ids"]])
            own.append(model(input_ids=ids, decoder_input_ids=begun, labels=labels).loss)
        found = measured(model, Dataset.from_dict(texts), batch_size=1)
        assert found["loss"] == pytest.approx(torch.stack(own).mean().item(), rel=1e-5)


class TestTranscripts:
    """Of models with CTC."""

    @pytest.fixture
    def heard(self, tmp_path):
        """A model, and what makes a processor with or without a mask."""
        path = tmp_path / "vocab.json"
        signs = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        path.write_text(json.dumps({sign: number for number, sign in enumerate(signs)}))
        convolutions = {"conv_dim": (16, 16), "conv_stride": (8, 8), "conv_kernel": (16, 8)}
        positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        config = hf.Wav2Vec2Config(
            **SIZES, **convolutions, **positions, num_feat_extract_layers=2, vocab_size=31, pad_token_id=0
        )

        def processor(masks=True):
            extractor = hf.Wav2Vec2FeatureExtractor(return_attention_mask=masks)
            return hf.Wav2Vec2Processor(extractor, hf.Wav2Vec2CTCTokenizer(str(path)))

        return seeded(hf.Wav2Vec2ForCTC, config), processor

    def rows(self, text, lengths=lambda number: 1600 + 600 * (number % 4)):
        waves = [np.random.default_rng(number).normal(size=lengths(number)).tolist() for number in range(8)]
        return Dataset.from_dict({"audio": waves, "text": [text] * 8})

    def test_letters_that_the_vocabulary_lacks_are_refused(self, heard):
        model, processor = heard
        with pytest.raises(ValueError, match=r"text: the tokenizer does not know 78% .* 'a cat sat'.*in capitals"):
            prune(model, self.rows("a cat sat"), processing_class=processor())

    @pytest.mark.parametrize("part", ["calibration", "evaluation"])
    def test_a_text_that_is_longer_than_its_recording_is_refused(self, heard, part):
        model, processor = heard
        good, bad = self.rows("A CAT SAT"), self.rows("A CAT SAT", lambda number: 400)
        given = (bad, False) if part == "calibration" else (good, bad)
        with pytest.raises(ValueError, match=rf"{part}: a recording has 6 frames, and its text needs 9.*infinite"):
            prune(model, *given, processing_class=processor())
        model.config.ctc_zero_infinity = True
        assert prune(model, good, bad, processing_class=processor(), apply=False).masks

    def test_a_letter_twice_needs_a_blank_between(self, heard):
        model, processor = heard
        rows = self.rows("AAAAAA", lambda number: 500)
        with pytest.raises(ValueError, match="a recording has 7 frames, and its text needs 11"):
            prune(model, rows, processing_class=processor())

    @pytest.mark.skipif(Version(hf.__version__) < Version("5.23"), reason="transformers counts them as letters")
    def test_labels_may_be_padded_with_the_blank(self, heard):
        model, _ = heard
        labels = torch.tensor([[7, 8, 9] + [0] * 30, [7, 8, 9, 10] + [0] * 29])
        assert prune(model, [{"input_values": torch.randn(2, 1600), "labels": labels}], apply=False).masks

    def test_without_a_mask_no_silence_is_heard_behind_a_recording(self, heard):
        model, processor = heard
        rows = self.rows("A CAT SAT")
        losses = [
            measured(model, rows, batch_size=size, num_samples=8, processing_class=processor(masks=False))["loss"]
            for size in (1, 4)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_pixels_of_no_class_are_refused_and_void_is_not():
    sizes = {"depths": (1, 1), "num_encoder_blocks": 2, "sr_ratios": (2, 1), "hidden_sizes": (16, 32)}
    shapes = {"patch_sizes": (7, 3), "strides": (4, 2), "num_attention_heads": (1, 2), "mlp_ratios": (2, 2)}
    model = seeded(
        hf.SegformerForSemanticSegmentation,
        hf.SegformerConfig(**sizes, **shapes, decoder_hidden_size=16, num_labels=3),
    )
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(3, (2, 32, 32))}
    batch["labels"][:, :4] = 255
    assert prune(model, [batch], apply=False).masks
    for wrong in (9, -100):
        labels = batch["labels"].clone()
        labels[0, 0, 0] = wrong
        with pytest.raises(ValueError, match=rf"evaluation: labels hold {wrong}, and Segformer.* 0 to 2 \(and 255"):
            prune(model, [batch], [{**batch, "labels": labels}])
    with pytest.raises(ValueError, match=r"class of each pixel, whole numbers, and these torch\.float32"):
        prune(model, [{**batch, "labels": batch["labels"].float()}])
    one_class = hf.SegformerConfig(**sizes, **shapes, decoder_hidden_size=16, num_labels=1)
    mask = {**batch, "labels": (batch["labels"] == 1).float()}
    assert prune(seeded(hf.SegformerForSemanticSegmentation, one_class), [mask], apply=False).masks
    with pytest.raises(ValueError, match="all are 255, or padding"):
        prune(model, [{**batch, "labels": torch.full((2, 32, 32), 255)}])


@pytest.mark.parametrize(
    ("classes", "boxes", "said"),
    [
        ([1], [[0.5, 0.5, 1.0, 1.2]], None),  # as data sets have them that nobody has cleaned
        ([], [], None),
        ([1], [[120.0, 80.0, 64.0, 32.0]], r"a box holds 120, and .*fractions of the image"),
        ([0], [[-5.0, 0.5, 0.2, 0.2]], r"a box holds -5, and"),
        ([3], [[0.5, 0.5, 0.2, 0.2]], r"class_labels hold 3, and .* predicts 0 to 2"),
        ([0, 1], [[0.5, 0.5, 0.2, 0.2]], r"a dict with its 'class_labels' \[boxes\] and 'boxes' \[boxes, 4\]"),
    ],
)
def test_boxes_are_fractions_of_their_image(classes, boxes, said):
    """In pixels they would have a loss, too: thousands of times as large, and of nothing that the model predicts."""
    labels = [{"class_labels": torch.tensor(classes).long(), "boxes": torch.tensor(boxes).reshape(-1, 4)}]
    batch = {"pixel_values": torch.randn(1, 3, 16, 16), "labels": labels}
    model = hf.YolosForObjectDetection(hf.YolosConfig(**YOLOS)).eval()
    if said is None:
        check_labels(model, batch, "calibration", needs_loss=True)
        return
    with pytest.raises(ValueError, match=rf"calibration: .*(?:{said})"):
        prune(model, [batch])


def test_classes_that_a_text_names_are_numbered_by_it():
    """Of Grounding DINO: its configuration has two labels, as every one that says nothing of them."""
    labels = [{"class_labels": torch.tensor([3]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}]
    with torch.device("meta"):
        model = hf.GroundingDinoForObjectDetection(hf.GroundingDinoConfig())
    check_labels(model, {"labels": labels}, "calibration", needs_loss=True)
    labels[0]["class_labels"] = torch.tensor([-1])
    with pytest.raises(ValueError, match="class_labels hold -1"):
        check_labels(model, {"labels": labels}, "calibration", needs_loss=True)


def test_void_of_upernet_has_its_own_name():
    stages = {"depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4), "out_features": [f"stage{one}" for one in range(1, 5)]}
    swin = hf.SwinConfig(image_size=32, patch_size=2, embed_dim=8, window_size=2, **stages)
    config = hf.UperNetConfig(backbone_config=swin, hidden_size=16, pool_scales=[1, 2], num_labels=3)
    config.use_auxiliary_head = False
    model = seeded(hf.UperNetForSemanticSegmentation, config)
    batches = []
    for number in range(4):
        labels = torch.randint(3, (1, 32, 32))
        labels[:, : 6 * number] = 255
        batches.append({"pixel_values": torch.randn(1, 3, 32, 32), "labels": labels})
    counts = [int((batch["labels"] != 255).sum()) for batch in batches]
    own = sum(model(**batch).loss.item() * count for batch, count in zip(batches, counts, strict=True)) / sum(counts)
    found = measured(model, batches)
    assert (found["loss"], found["terms"]) == (pytest.approx(own, rel=1e-5), sum(counts))


def test_words_with_a_place_on_a_page_are_not_read_without_it():
    model = seeded(hf.LayoutLMForTokenClassification, hf.LayoutLMConfig(**BERT, num_labels=3))
    rows = Dataset.from_dict({"tokens": [["a", "b"]] * 4, "bboxes": [[[0, 0, 1, 1]] * 2] * 4, "ner_tags": [[0, 1]] * 4})
    with pytest.raises(ValueError, match=r"LayoutLM.* also reads where each token stands .*'input_ids', 'bbox'"):
        prune(model, rows)
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.zeros(2, 3, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"reads tokens with their place on the page, and a batch has no 'bbox'"):
        prune(model, [batch])
    assert prune(model, [{**batch, "bbox": torch.zeros(2, 3, 4, dtype=torch.long)}], apply=False).masks


def test_words_of_another_number_than_their_labels_are_refused():
    """A batch of two such rows is as wide as the longer of each, and nothing told which label is whose."""
    model = seeded(hf.BertForTokenClassification, hf.BertConfig(**BERT, num_labels=3))
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2]] * 2, "labels": [[0, 1], [0, 1, 2]] * 2})
    with pytest.raises(ValueError, match=r"a row has 3 input_ids and 2 labels: give one for each token"):
        prune(model, rows)
    vilt = hf.ViltConfig(**BERT, image_size=16, patch_size=8, num_labels=3, max_image_length=-1)
    model = seeded(hf.ViltForQuestionAnswering, vilt)
    row = {"input_ids": [1, 2, 3, 4], "pixel_values": torch.zeros(3, 16, 16).tolist(), "labels": [0.3, 1.0, 0.0]}
    assert prune(model, Dataset.from_list([row] * 4), apply=False).masks  # one for each answer


def test_one_label_a_row_of_a_class_that_no_task_is_known_of_is_refused():
    model = seeded(hf.BertForNextSentencePrediction, hf.BertConfig(**BERT))
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": number % 2} for number in range(4)])
    with pytest.raises(ValueError, match="rows have one label each, and for a model of this class no batches are made"):
        prune(model, rows)
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([0, 2])}
    with pytest.raises(ValueError, match="labels hold 2, and BertForNextSentencePrediction predicts 0 to 1"):
        prune(model, [batch])


@pytest.mark.parametrize(
    ("kind", "labels", "given"),
    [
        ("multi_label_classification", torch.tensor([[0, 1, 1], [1, 0, 0]]), r"\(2, 3\) of int64"),
        ("multi_label_classification", torch.ones(2, 2), r"\(2, 2\) of float32"),
        (None, torch.tensor([0.0, 1.0]), r"\(2,\) of float32"),
    ],
)
def test_labels_of_rows_with_several_classes_have_a_place_for_each(kind, labels, given):
    model = seeded(hf.BertForSequenceClassification, hf.BertConfig(**BERT, num_labels=3, problem_type=kind))
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": labels}
    with pytest.raises(ValueError, match=rf"\[rows, 3\], 1\.0 for each class .* and these are {given}"):
        prune(model, [batch])
    batch["labels"] = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    prune(model, [batch])


def test_rows_that_no_batches_are_made_of_are_named():
    images = Dataset.from_dict({"image": [Image.new("RGB", (8, 8))] * 2, "label": [0, 1]})
    model = hf.YolosForObjectDetection(hf.YolosConfig(**YOLOS))
    with pytest.raises(ValueError, match=r"YolosForObjectDetection reads images, of which no batches are made here"):
        prune(model, images)


def test_a_model_without_a_loss_wants_one():
    sizes = {"image_size": 32, "patch_size": 8, "neck_hidden_sizes": [8, 16, 16, 16], "fusion_hidden_size": 16}
    config = hf.DPTConfig(**SIZES | {"num_hidden_layers": 4}, **sizes, backbone_out_indices=[0, 1, 2, 3])
    model = seeded(hf.DPTForDepthEstimation, config)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.rand(2, 32, 32)}
    with pytest.raises(ValueError, match=r"DPTForDepthEstimation has no loss of its own .* give a loss_fn"):
        prune(model, [batch], include=["dpt.encoder.layer.*"])


def test_an_operation_that_a_device_lacks_is_no_missing_loss(monkeypatch):
    def lacks(*_, **__):
        raise NotImplementedError("The operator 'aten::one' is not currently implemented for this device.")

    model = seeded(hf.BertForSequenceClassification, hf.BertConfig(**BERT))
    monkeypatch.setattr(type(model), "forward", lacks)
    with pytest.raises(NotImplementedError, match="aten::one"):
        summed_loss(model, {"input_ids": torch.ones(1, 3, dtype=torch.long), "labels": torch.tensor([1])})


def test_what_does_not_run_on_a_batch_that_is_made_up_is_not_timed():
    model = seeded(hf.BertForSequenceClassification, hf.BertConfig(**BERT))
    model.forward = lambda **_: [][0]
    with pytest.raises(ValueError, match=r"BertForSequenceClassification cannot be timed: .* \(IndexError: "):
        Subject(model).prefill(Workload(prompt_length=4, new_tokens=1))
    writes = cases.build("llama")
    writes.generate = lambda **_: [][0]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be timed: it does not write .* \(IndexError: "):
        Subject(writes).generate(Workload(prompt_length=4, new_tokens=2))


def test_fsmt_is_not_recovered_towards_its_source():
    vocabulary = {"langs": ["en", "de"], "src_vocab_size": cases.VOCABULARY, "tgt_vocab_size": cases.VOCABULARY}
    models = [seeded(hf.FSMTForConditionalGeneration, hf.FSMTConfig(**SEQ2SEQ, **vocabulary)) for _ in range(2)]
    rows = Dataset.from_dict({"document": ["a b"] * 40, "summary": ["b a"] * 40})
    prune(models[0], rows, batch_size=1)
    with pytest.raises(ValueError, match="FSMTForConditionalGeneration cannot be recovered"):
        recover_pretrained(*models, RecoveryConfig(steps=2), text=rows, processing_class=cases.tokenizer())


def test_images_to_restore_need_no_labels():
    """ViTMAE hides what it draws, the same in each pass; another has to be told what is hidden."""
    sizes = {**SIZES, "image_size": 32, "patch_size": 8}
    decoder = {"decoder_num_attention_heads": 4, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1}
    mae = hf.ViTMAEConfig(**sizes, **decoder, decoder_intermediate_size=24)
    batches = [{"pixel_values": torch.randn(2, 3, 32, 32)} for _ in range(2)]
    found = prune(seeded(hf.ViTMAEForPreTraining, mae), batches, batches, sparsity=0.001, update="none").report
    assert found.evaluation["pruned"]["loss"] == pytest.approx(found.evaluation["dense"]["loss"], rel=1e-3)
    with pytest.raises(
        ValueError, match=r"returns no loss for a batch of pixel_values. Give what else it needs for one"
    ):
        prune(seeded(hf.ViTForMaskedImageModeling, hf.ViTConfig(**sizes, encoder_stride=8)), batches)


def test_structures_of_what_no_batch_can_be_made_up_for_are_refused():
    wide = SEQ2SEQ | {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    config = hf.TimeSeriesTransformerConfig(
        **wide, prediction_length=4, context_length=16, lags_sequence=[1], num_time_features=1
    )
    past = {"past_values": torch.randn(4, 17), "past_time_features": torch.randn(4, 17, 1)}
    future = {"future_values": torch.randn(4, 4), "future_time_features": torch.randn(4, 4, 1)}
    batch = {**past, "past_observed_mask": torch.ones(4, 17), **future}
    model = seeded(hf.TimeSeriesTransformerForPrediction, config)
    with pytest.raises(ValueError, match=r"no FFN channels that could go in .*: its matrices are of other kinds"):
        prune(model, [batch], structure={"ffn": 64}, sparsity=None)
    with pytest.raises(ValueError, match=r"no batch can be made up for a TimeSeries.*, which takes past_values"):
        sample_batch(model, 1, 4)
    assert prune(model, [batch], apply=False).masks


def test_a_model_that_answers_by_decoding_keeps_its_labels():
    """BLIP's configuration is of no encoder-decoder, and without labels it does not run."""
    text = {**SIZES, "vocab_size": cases.VOCABULARY, "encoder_hidden_size": 32, "max_position_embeddings": 64}
    text |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "sep_token_id": 257, "projection_dim": 16}
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    config = hf.BlipConfig(text_config=text, vision_config=vision, projection_dim=16)
    ids = torch.randint(5, 250, (2, 6))
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "input_ids": ids, "labels": ids}
    batch["attention_mask"] = torch.ones_like(ids)
    pixels = torch.zeros(3, 32, 32).tolist()
    rows = [{"pixel_values": pixels, "input_ids": [9] * 4, "labels": [9] * (2 + number % 3)} for number in range(8)]
    assert prune(seeded(hf.BlipForQuestionAnswering, config), Dataset.from_list(rows), num_samples=8, apply=False).masks
    result = prune(seeded(hf.BlipForQuestionAnswering, config), [batch])
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("sparsity", "options"),
    [
        (0.001, {"update": "none"}),
        (0.5, {}),
        (0.5, {"order": "sequential", "update": "none"}),
        (0.5, {"score": "wanda", "update": "none"}),
    ],
)
def test_a_loss_that_draws_is_measured_on_the_same_draws(sparsity, options):
    """PatchTSMixer hides a part of its input in evaluation, too."""
    sizes = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16}
    model = seeded(hf.PatchTSMixerForPretraining, hf.PatchTSMixerConfig(**sizes, num_layers=2))
    batches = [{"past_values": torch.randn(4, 16, 2)} for _ in range(4)]
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(prune(model, batches[:2], batches[2:], sparsity=sparsity, apply=False, **options))
        assert torch.equal(torch.get_rng_state(), before), "the caller's generator is theirs"
    first, second = (result.report.evaluation for result in results)
    assert first == second
    if sparsity < 0.01:
        assert first["pruned"]["loss"] == pytest.approx(first["dense"]["loss"], rel=1e-3)
    for name, mask in results[0].masks.items():
        assert torch.equal(mask, results[1].masks[name])
