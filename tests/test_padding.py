"""Padding has no part in what is pruned: rows that come alone, and the same rows padded in batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.padding import BatchLayout
from tests.architectures import SIZES

PAD, START, END = 0, 2, 1
WORDS = {"vocab_size": 64, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
SHORT = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
SIDE = {**WORDS, **SHORT, "num_key_value_heads": 1, "head_dim": 8}
Row = dict[str, Tensor]


def t5_gemma() -> PreTrainedModel:
    """Its cross-attention has a name of its own."""
    config = hf.T5GemmaConfig(encoder=SIDE, decoder={**SIDE, "is_decoder": True}, vocab_size=64)
    return hf.T5GemmaForConditionalGeneration(config)


def bert_to_gpt2() -> PreTrainedModel:
    """Its decoder makes keys and values with one matrix."""
    bert = hf.BertConfig(vocab_size=64, max_position_embeddings=32, **SHORT)
    gpt2 = hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32, add_cross_attention=True)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(bert, gpt2)
    config.pad_token_id, config.decoder_start_token_id, config.eos_token_id = PAD, START, END
    return hf.EncoderDecoderModel(config=config)


def switch() -> PreTrainedModel:
    """A mixture: rows go alone, cut to their own tokens."""
    blocks = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    losses = {"router_z_loss_coef": 0.0, "router_aux_loss_coef": 0.0}
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 4, "num_experts": 4}
    config = hf.SwitchTransformersConfig(**blocks, **losses, **sizes, **WORDS, decoder_start_token_id=PAD)
    return hf.SwitchTransformersForConditionalGeneration(config)


def bart_classifier() -> PreTrainedModel:
    """Its decoder is given the inputs, and no labels."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return hf.BartForSequenceClassification(hf.BartConfig(**sizes, **heads, **WORDS, num_labels=3))


def bert_with_choices() -> PreTrainedModel:
    """It computes on the choices of all rows as on texts of their own."""
    return hf.BertForMultipleChoice(hf.BertConfig(vocab_size=64, max_position_embeddings=32, **SHORT))


def wav2vec2() -> PreTrainedModel:
    """Blocks see frames, and the mask is of samples."""
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.Wav2Vec2Config(
        **SIZES, **convolutions, **positions, vocab_size=16, feat_extract_norm="layer", mask_time_prob=0.0
    )
    return hf.Wav2Vec2ForCTC(config)


def sew() -> PreTrainedModel:
    """Its blocks see two frames as one."""
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "squeeze_factor": 2}
    config = hf.SEWConfig(
        **SIZES, **convolutions, **positions, vocab_size=16, feat_extract_norm="layer", mask_time_prob=0.0
    )
    return hf.SEWForCTC(config)


def parakeet() -> PreTrainedModel:
    encoder = {**SHORT, "num_mel_bins": 16, "subsampling_factor": 4, "subsampling_conv_channels": 8}
    return hf.ParakeetForCTC(hf.ParakeetCTCConfig(vocab_size=16, pad_token_id=0, encoder_config=encoder))


def pegasus_x() -> PreTrainedModel:
    """It pads by itself, in front of its blocks."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "block_size": 8, "num_global_tokens": 4}
    return hf.PegasusXForConditionalGeneration(hf.PegasusXConfig(**sizes, **heads, **WORDS, decoder_start_token_id=PAD))


def vilt() -> PreTrainedModel:
    """Patches of an image are behind the text."""
    sizes = {**SHORT, "image_size": 16, "patch_size": 8, "max_position_embeddings": 32}
    return hf.ViltForQuestionAnswering(hf.ViltConfig(vocab_size=64, num_labels=3, **sizes))


def translations(number: int, generator: torch.Generator) -> Row:
    """Source and target of any lengths, most of which differ."""
    source, target = (int(torch.randint(3, 12, (), generator=generator)) for _ in range(2))
    labels = torch.randint(3, 64, (1, target), generator=generator)
    return {**_masked(torch.randint(3, 64, (1, source), generator=generator)), "labels": labels}


def sentences(number: int, generator: torch.Generator) -> Row:
    length = int(torch.randint(3, 12, (), generator=generator))
    ids = torch.cat([torch.randint(3, 64, (1, length), generator=generator), torch.tensor([[END]])], 1)
    return {**_masked(ids), "labels": torch.tensor([number % 3])}


def questions(number: int, generator: torch.Generator) -> Row:
    """Three texts, each padded to the longest of them."""
    lengths = torch.randint(3, 12, (3,), generator=generator)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()[None]
    ids = torch.randint(3, 64, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor([number % 3])}


def sounds(number: int, generator: torch.Generator) -> Row:
    length = int(torch.randint(150, 900, (), generator=generator))
    sound = torch.randn(1, length, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, 16, (1, 4), generator=generator)
    return {"input_values": sound, "attention_mask": torch.ones_like(sound, dtype=torch.long), "labels": labels}


def features(number: int, generator: torch.Generator) -> Row:
    """Of speech, as an extractor makes them."""
    heard = torch.randn(1, int(torch.randint(24, 60, (), generator=generator)), 16, generator=generator)
    labels = torch.randint(1, 16, (1, 4), generator=generator)
    mask = torch.ones(heard.shape[:2], dtype=torch.long)
    return {"input_features": heard.double(), "attention_mask": mask, "labels": labels}


def asked_of_images(number: int, generator: torch.Generator) -> Row:
    ids = torch.randint(3, 64, (1, int(torch.randint(3, 12, (), generator=generator))), generator=generator)
    pixels = torch.randn(1, 3, 16, 16, generator=generator, dtype=torch.float64)
    answers = torch.eye(3, dtype=torch.float64)[number % 3][None]
    return {**_masked(ids), "pixel_values": pixels, "labels": answers}


def _masked(ids: Tensor) -> Row:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _padded(rows: list[Row]) -> Row:
    """These rows as one batch, as a collator makes it."""
    batch = {}
    for name in rows[0]:
        values, filling = [row[name] for row in rows], -100 if name == "labels" else PAD
        if name == "input_features":  # [1, frames, features]
            batch[name] = pad_sequence([one[0] for one in values], batch_first=True)
            continue
        longest = max(value.shape[-1] for value in values)
        whole = (
            values if values[0].ndim == 1 else [pad(one, (0, longest - one.shape[-1]), value=filling) for one in values]
        )
        batch[name] = torch.cat(whole)
    return batch


@pytest.mark.parametrize(
    ("make", "row", "options"),
    [
        (t5_gemma, translations, {"score": "wanda"}),
        (bert_to_gpt2, translations, {"score": "wanda"}),
        (switch, translations, {"probes": 1}),
        (bart_classifier, sentences, {}),
        (wav2vec2, sounds, {}),
        (bert_with_choices, questions, {}),
        (bert_with_choices, questions, {"score": "wanda"}),
        (sew, sounds, {"score": "wanda", "update": "none"}),
        (parakeet, features, {"score": "wanda", "update": "none"}),
        (pegasus_x, translations, {"score": "wanda", "update": "none"}),
        (vilt, asked_of_images, {"score": "wanda", "update": "none"}),
    ],
)
def test_padding_has_no_part_in_the_result(make: Callable[[], PreTrainedModel], row, options):
    torch.manual_seed(0)
    model, generator = make().double().eval(), torch.Generator().manual_seed(1)
    rows = [row(number, generator) for number in range(8)]
    alone, together = (
        prune_pretrained(
            model, GradProbeConfig(**options), calibration=batches, evaluation=False, apply=False, progress=False
        ).masks
        for batches in (rows, [_padded(rows[:4]), _padded(rows[4:])])
    )
    # Two weights of a row that count alike may change places: other products are summed in another order.
    swapped = 4 if make in (sew, pegasus_x, parakeet) else 0
    assert sum(int((alone[name] ^ together[name]).sum()) for name in alone) <= swapped


@pytest.mark.parametrize("make", [hf.BartForConditionalGeneration, hf.T5ForConditionalGeneration])
def test_a_prompt_of_the_decoder_counts_though_nothing_predicts_it(make):
    """As Donut and Whisper are trained: what a decoder is told to do comes before what it writes."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "decoder_start_token_id": START, **WORDS}
    model = make(make.config_class(**sizes, **_DEPTHS[make])).double().eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (4, 12), generator=generator)
    labels = torch.randint(3, 64, (4, 10), generator=generator)
    labels[:, :6] = -100
    labels[:2, 8:] = -100  # padding
    batch = {**_masked(ids), "decoder_input_ids": torch.randint(3, 64, (4, 10), generator=generator), "labels": labels}
    mask = torch.ones_like(labels)
    mask[:2, 8:] = 0
    told, given = (
        prune_pretrained(
            model, GradProbeConfig(score="wanda"), calibration=[one], evaluation=False, apply=False, progress=False
        ).masks
        for one in (batch, {**batch, "decoder_attention_mask": mask})
    )
    assert all(torch.equal(told[name], given[name]) for name in given)


_DEPTHS = {
    hf.BartForConditionalGeneration: {
        f"{side}_{what}": count
        for side in ("encoder", "decoder")
        for what, count in (("layers", 1), ("ffn_dim", 24), ("attention_heads", 2))
    },
    hf.T5ForConditionalGeneration: {"num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 24},
}


def test_a_loss_that_goes_by_the_mask_has_as_many_terms():
    """ELECTRA's, whose labels at padding may be anything."""
    torch.manual_seed(0)
    model = hf.ElectraForPreTraining(hf.ElectraConfig(**SHORT, vocab_size=64, embedding_size=16)).eval()
    lengths, generator = torch.tensor([3, 9, 5, 12]), torch.Generator().manual_seed(1)
    mask = (torch.arange(12) < lengths[:, None]).long()
    batch = {
        "input_ids": torch.randint(3, 64, (4, 12), generator=generator) * mask,
        "attention_mask": mask,
        "labels": torch.randint(2, (4, 12), generator=generator) * mask,
    }
    total = 0.0
    for row, length in enumerate(lengths.tolist()):
        alone = {name: values[row : row + 1, :length] for name, values in batch.items()}
        total += model(**alone).loss.item() * length
    options = {"evaluation": [batch], "apply": False, "progress": False}
    found = prune_pretrained(model, GradProbeConfig(score="magnitude"), **options).report.evaluation["dense"]
    assert found["terms"] == int(lengths.sum())
    assert found["loss"] == pytest.approx(total / int(lengths.sum()), rel=1e-6)


def test_what_fills_an_attention_window_is_padding():
    """Longformer pads by itself, and scales its queries in place."""
    torch.manual_seed(0)
    sizes = {**SHORT, "num_hidden_layers": 2, "attention_window": [8, 8], "max_position_embeddings": 32}
    model = hf.LongformerForSequenceClassification(hf.LongformerConfig(**sizes, **WORDS)).double().eval()
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(3, 64, (1, 5), generator=generator)} for _ in range(6)]
    rows = [{**row, "labels": torch.tensor([number % 2])} for number, row in enumerate(rows)]
    filled = [
        {
            "input_ids": pad(row["input_ids"], (0, 3)),
            "attention_mask": pad(torch.ones_like(row["input_ids"]), (0, 3)),
            "labels": row["labels"],
        }
        for row in rows
    ]
    for options in ({"score": "wanda"}, {}):
        alone, together = (
            prune_pretrained(
                model, GradProbeConfig(**options), calibration=given, evaluation=False, apply=False, progress=False
            ).masks
            for given in (rows, filled)
        )
        assert {name: int((alone[name] ^ together[name]).sum()) for name in alone} == dict.fromkeys(alone, 0)


def test_source_and_target_that_cannot_be_told_apart_are_refused():
    """One map makes keys and values of both: where both are as long, nothing says whose tokens they are."""
    side = {**SIDE, "layer_types": ["full_attention"]}
    config = hf.T5Gemma2Config(encoder={"text_config": side, "vision_config": SHORT}, decoder=side)
    model = hf.T5Gemma2ForConditionalGeneration(config)
    mask, ids = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.randint(3, 64, (2, 3))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    with pytest.raises(ValueError, match=r"reads its source and its target with the same maps.*batch_size=1"):
        prune_pretrained(model, GradProbeConfig(score="wanda"), calibration=[batch], evaluation=False, progress=False)


@pytest.mark.parametrize("masked", [True, False])
def test_padding_that_a_model_adds_by_itself_does_not_count(masked):
    sizes = {**SHORT, "vocab_size": 64, "max_position_embeddings": 64, "attention_window": 8}
    model, ids = hf.LongformerForMaskedLM(hf.LongformerConfig(**sizes)).eval(), torch.randint(3, 60, (1, 12))
    row = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if masked else {})
    layout, seen = BatchLayout.of(row, model), {}
    targets = [
        target for target in find_targets(model) if target.role in ("attention.self.query", "intermediate.dense")
    ]
    for target in targets:
        model.get_submodule(target.sites[0].module).register_forward_pre_hook(
            lambda _, args, target=target: seen.update({target: args[0].detach()})
        )
    model(**row)
    for target, inputs in seen.items():
        assert inputs.shape[:2] in ((16, 1), (1, 16)), "of which four are padding"
        found = layout.unpadded_inputs(target, target.sites[0], inputs)
        assert torch.equal(found, inputs.reshape(16, -1)[:12])
