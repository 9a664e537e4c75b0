"""A smaller model is compared with the masked one, before any work and before anything is written."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForSequenceClassification,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DonutSwinConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ParakeetEncoder,
    ParakeetEncoderConfig,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTMAEConfig,
    ViTMAEModel,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForCTC,
)

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.estimation import machine
from gradprobe_hf.model import config_names
from gradprobe_hf.model.families import random_batch, sample_batch
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.shapes import equality
from gradprobe_hf.structures import shapes
from tests import cases
from tests.smaller_models import SIZES, build
from tests.structure_page import BEGINS, TWO_STACKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("example", [True, False])
def test_a_model_that_computes_something_else_when_it_is_smaller_is_not_written(dtype, example, tmp_path, monkeypatch):
    """Found out before any work by an example of what is to go; if that shows nothing, by what was written."""
    batches = cases.batches("llama")
    # A constant of attention grows with the number of its block, which changes when one before it goes.
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**{**SIZES, "num_hidden_layers": 4})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
    model.to(dtype)  # its outputs are 3% apart: rounding to bfloat16 moves those of other models as far
    dense = cases.bits(model)
    if example:
        monkeypatch.setattr(
            "gradprobe_hf.run.request.reading.load_batches", lambda *_, **__: pytest.fail("text was read")
        )
    else:
        monkeypatch.setattr("gradprobe_hf.run.request.inputs.check_example", lambda *_: None)
    error = ValueError if example else RuntimeError
    with pytest.raises(error, match="does not compute what the masked one does"):
        prune_pretrained(
            model,
            GradProbeConfig(structure={"blocks": 1}, update="none"),
            calibration=batches,
            evaluation=False,
            output_dir=tmp_path / "made",
            progress=False,
        )
    assert list(tmp_path.iterdir()) == []
    assert cases.changed(model, dense) == []


@pytest.mark.parametrize("known", [True, False])
def test_what_takes_turns_from_block_to_block_goes_with_its_block(known, tmp_path, monkeypatch):
    """Without two blocks in a row turns are still in step, and nothing shows."""
    thetas = [10_000.0, 0] * 4
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": len(thetas), "layer_rope_theta": thetas}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite_swa", **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    if not known:
        monkeypatch.setattr(config_names, "_PER_BLOCK", ("layer_types",))
        monkeypatch.setattr(shapes, "told_by_number", lambda _: None)
        monkeypatch.setattr(
            "gradprobe_hf.run.request.reading.load_batches", lambda *_, **__: pytest.fail("text was read")
        )

    def prune():
        options = GradProbeConfig(structure={"blocks": 2}, update="none")
        out = tmp_path / "made"
        batches = cases.batches("llama")
        prune_pretrained(model, options, calibration=batches, evaluation=False, output_dir=out, progress=False)
        return AutoConfig.from_pretrained(out)

    if known:
        made = prune()
        assert (len(made.layer_rope_theta), made.num_hidden_layers) == (6, 6)
    else:
        with pytest.raises(ValueError, match="does not compute what the masked one does"):
            prune()


def test_a_model_that_was_rounded_in_memory_is_compared_as_it_is(tmp_path, monkeypatch):
    """Behind `.to(torch.bfloat16)` the frequencies of rotary embeddings are rounded too, which no file tells."""
    monkeypatch.setattr("gradprobe_hf.run.shapes.equality.TOLERANCE", {torch.float32: 1e-5})
    model = build("qwen3").to(torch.bfloat16)
    dense = cases.bits(model)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    prune_pretrained(
        model,
        GradProbeConfig(structure={"ffn": 8}, update="none"),
        calibration=cases.batches("llama"),
        evaluation=False,
        output_dir=tmp_path / "made",
        progress=False,
        apply=False,
    )
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto")
    assert made.dtype == torch.bfloat16
    assert cases.changed(model, dense) == []


def test_without_room_for_a_second_model_it_is_compared_from_disk(tmp_path, monkeypatch):
    compared = []

    def note(model, batch, wide):
        compared.append((is_offloaded(model), wide))
        return outputs(model, batch, wide)

    outputs = equality._outputs
    monkeypatch.setattr(equality, "_outputs", note)
    for room in (0, 1 << 40):
        monkeypatch.setattr(machine, "available_bytes", lambda _, room=room: room)
        model = build("llama").to(torch.bfloat16)
        prune_pretrained(
            model,
            GradProbeConfig(structure={"ffn": 8}, update="none"),
            calibration=cases.batches("llama"),
            evaluation=False,
            output_dir=tmp_path / str(room),
            progress=False,
        )
    # With room an example is compared before any work, too.
    assert compared == [(False, False), (True, False), *[(False, True)] * 4]


@pytest.mark.parametrize("what", ["zero head", "wants an end", "masks at random"])
def test_models_that_say_little_of_a_random_batch_are_no_false_alarm(what, caplog):
    """Outputs of zero, no outputs, and other outputs each time."""
    state = torch.get_rng_state()
    if what == "wants an end":
        sizes = {**TWO_STACKS, **BEGINS, "forced_eos_token_id": None}
        model, config = BartForSequenceClassification(BartConfig(**sizes)), GradProbeConfig(structure={"ffn": 8})
    elif what == "masks at random":
        sizes = {**SIZES, "image_size": 16, "patch_size": 4, "decoder_hidden_size": 16, "decoder_intermediate_size": 16}
        sizes |= {"decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
        model, config = ViTMAEModel(ViTMAEConfig(**sizes)), GradProbeConfig(structure={"ffn": 8})
    else:
        model, config = build("llama"), GradProbeConfig(structure={"ffn": 8})
        torch.nn.init.zeros_(model.lm_head.weight)
    model = model.eval().to(torch.bfloat16)
    before, seen = cases.bits(model), torch.get_rng_state()
    equality.check_example(model, find_targets(model), config)
    assert cases.changed(model, before) == []
    assert torch.equal(torch.get_rng_state(), seen)
    assert ("was not compared" in caplog.text) == (what == "wants an end")
    torch.set_rng_state(state)


def test_outputs_of_zero_are_another_thing_than_outputs():
    model, other = build("llama"), build("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    masked = equality.MaskedOutputs.of(model)
    assert masked.difference(model) is None
    assert "outputs are inf apart" in masked.difference(other)


@pytest.mark.parametrize("value", [float("-inf"), torch.finfo(torch.float32).min])
def test_outputs_that_are_masked_hide_no_others(value, monkeypatch):
    """Tokens that are never written, say: their logits are as they should be, and no measure of the others."""
    model, other = build("llama"), build("llama")
    with torch.no_grad():
        other.model.norm.weight.mul_(1.01)
    plain = type(model).forward

    def masked_forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits[..., :7] = value
        return output

    monkeypatch.setattr(type(model), "forward", masked_forward)
    masked = equality.MaskedOutputs.of(model)
    assert masked.difference(model) is None
    assert "outputs are 1.0e-02 apart" in masked.difference(other)
    monkeypatch.setattr(type(model), "forward", plain)
    assert "does not compute what the masked one does" in masked.difference(model)


def test_what_is_predicted_is_compared_and_not_what_routers_lose():
    """Their loss stands in front of the logits where the configuration asks for it."""
    model, other = build("mixtral"), build("mixtral")
    model.config.output_router_logits = other.config.output_router_logits = True
    with torch.no_grad():
        other.lm_head.weight[0] += 1  # routers do not see it
    assert model(**random_batch(model, 1, 8))[0].ndim == 0
    masked = equality.MaskedOutputs.of(model)
    assert masked.difference(model) is None
    assert "does not compute what the masked one does" in masked.difference(other)


def _reader(encoder):
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "max_position_embeddings": 32}
    decoder = TrOCRConfig(**TINY, **sizes, cross_attention_hidden_size=encoder.hidden_size)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id, config.decoder_start_token_id = 1, 2
    return VisionEncoderDecoderModel(config)


TINY = {"vocab_size": 64, "d_model": 16}
LAYER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
OF_MANY_KINDS = {
    "trocr": lambda: _reader(ViTConfig(**LAYER, image_size=8, patch_size=4)),
    "donut": lambda: _reader(
        DonutSwinConfig(image_size=[32, 64], embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2)
    ),
    "speech_to_text": lambda: Speech2TextForConditionalGeneration(
        Speech2TextConfig(
            **TINY,
            encoder_layers=1,
            decoder_layers=1,
            conv_channels=8,
            input_feat_per_channel=8,
            max_target_positions=32,
        )
    ),
    "wav2vec2_bert": lambda: Wav2Vec2BertForCTC(
        Wav2Vec2BertConfig(**LAYER, vocab_size=64, feature_projection_input_dim=8)
    ),
}


@pytest.mark.parametrize("name", OF_MANY_KINDS)
def test_a_batch_is_made_up_for_models_of_images_and_speech(name):
    model = OF_MANY_KINDS[name]().eval()
    assert model(**random_batch(model, 2, 12))[0].shape == (2, 12, 64)
    drawn = {key: torch.zeros(one.shape, dtype=one.dtype) for key, one in sample_batch(model, 2, 12).items()}
    drawn["labels"] += 3
    assert model(**drawn).loss > 0


def test_speech_in_a_form_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="no batch can be made up for a ParakeetEncoder"):
        random_batch(ParakeetEncoder(ParakeetEncoderConfig(**LAYER)), 1, 8)


BEFORE = "model.layers.0.mlp.up_proj.weight"
NOT_FINITE = [
    (BEFORE, torch.nan, {"structure": {"ffn": 8}}, "what LlamaForCausalLM computes of a random batch is NaN"),
    (BEFORE, torch.inf, {"structure": {"blocks": 1}}, "the inputs of model.layers.1 are not finite"),
    ("lm_head.weight", torch.inf, {"structure": {"blocks": 1}, "update": "none"}, "is not finite, whichever block is"),
]


@pytest.mark.parametrize(("name", "value", "options", "message"), NOT_FINITE, ids=str)
def test_weights_that_are_not_finite_are_not_said_to_be_a_matter_of_the_shape(name, value, options, message):
    model = build("llama")
    with torch.no_grad():
        model.get_parameter(name)[20, 3] = value
    dense = cases.bits(model)
    with pytest.raises(ValueError, match=rf"{message}.*ook for NaN in .*weights"):
        cases.prune(model, cases.batches("llama"), **options)
    assert all(torch.equal(dense[one].nan_to_num(), now.nan_to_num()) for one, now in model.state_dict().items())


class Windowed(LlamaForCausalLM):
    """Every second block sees 64 tokens, by its number, as code that is shared beside weights may have it."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[::2]:
            layer.self_attn.register_forward_pre_hook(self.within_window, with_kwargs=True)

    @staticmethod
    def within_window(_, args, kwargs):
        place = torch.arange(kwargs["hidden_states"].shape[1])
        far = (place[:, None] < place) | (place[:, None] - place >= 64)
        return args, kwargs | {"attention_mask": torch.zeros(far.shape).masked_fill(far, -1e9)[None, None]}


def test_a_window_that_no_configuration_tells_is_found_out(monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 4, "max_position_embeddings": 128})
    model = Windowed(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
    monkeypatch.setattr("gradprobe_hf.run.request.reading.load_batches", lambda *_, **__: pytest.fail("text was read"))
    config = GradProbeConfig(structure={"blocks": 1}, update="none")
    with pytest.raises(ValueError, match="the smaller Windowed does not compute what the masked one does"):
        prune_pretrained(model, config, calibration=cases.batches("llama"), evaluation=False, progress=False)
