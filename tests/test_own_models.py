"""Models that somebody has changed by hand, classes of their own, and calls from odd places: nothing goes unsaid."""

from __future__ import annotations

import copy
import json
import logging
import os

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import BertConfig, BertLMHeadModel, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from gradprobe_hf import GradProbeConfig, RecoveryConfig, compare_pretrained, prune_pretrained, recover_pretrained
from gradprobe_hf.data.batches import from_iterable
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.training import keep_sparsity
from tests import cases

FAST = {"preset": "fast", "sparsity": 0.5}


def pruned(model, rows=None, **options):
    return cases.prune(model, rows or cases.batches("llama"), **{**FAST, **options})


def cut(model):
    model.model.layers = model.model.layers[:2]


def deep_head(model):
    size, words = model.config.hidden_size, model.config.vocab_size
    model.lm_head = nn.Sequential(nn.Linear(size, size), nn.Linear(size, words, bias=False))


def torch_pruned(model):
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.up_proj, "weight", 0.3)


def normed(model):
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.mlp.up_proj)


def other_heads(model):
    model.config.head_dim = 2 * model.config.head_dim


def one_block_twice(model):
    model.model.layers[1] = model.model.layers[0]


def one_storage(model):
    first, second = (layer.mlp.up_proj for layer in model.model.layers[:2])
    second.weight = nn.Parameter(first.weight.data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "configuration makes model.layers.2"),
        (deep_head, "lm_head"),
        (torch_pruned, "up_proj.weight"),
        (normed, "up_proj.weight"),
        (other_heads, r"q_proj.weight is \["),
        (one_block_twice, "are one weight"),
        (one_storage, "are one weight"),
    ],
)
def test_a_checkpoint_that_would_be_another_model_is_refused_before_any_work(change, said, tmp_path, monkeypatch):
    model = cases.build("llama")
    change(model)
    monkeypatch.setattr("gradprobe_hf.pruning.decide_pruning", lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=said):
        pruned(model, exclude=["up_proj"], output_dir=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_in_memory_it_may_be_pruned_and_is_not_saved_later(tmp_path):
    model = cases.build("llama")
    cut(model)
    result = pruned(model)
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="would not load as it is"):
        result.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [torch_pruned, normed])
def test_weights_that_torch_makes_anew_are_refused_by_name(change):
    model = cases.build("llama")
    change(model)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight is made anew in every pass"):
        pruned(model)


def test_what_is_left_out_under_one_name_is_dense_under_all():
    model = cases.build("tied")
    before = model.lm_head.weight.clone()
    result = pruned(model, cases.batches("tied"), include=["*"], exclude=["lm_head"], apply=True)
    assert torch.equal(model.lm_head.weight, before)
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)


class SmoothedForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, attention_mask=None, **more):
        found = super().forward(input_ids=input_ids, attention_mask=attention_mask, **more)
        if labels is not None:
            found.loss = found.logits[:, :, 0].pow(2).mean()
        return found


class HandsOnForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **more):
        return super().forward(*args, **more)


class LongerForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, **_):
        found = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=torch.cat([found[:, :4], found], 1), use_cache=False)


def own(cls):
    torch.manual_seed(0)
    return cls(cases.build("llama").config).eval()


def test_a_loss_of_its_own_that_is_not_called_is_warned_of(caplog):
    bounded = {"max_matrix_sparsity": 0.9}  # else a matrix is emptied, which is told, too
    with caplog.at_level(logging.WARNING):
        (warning,) = pruned(own(SmoothedForCausalLM), **bounded).report.warnings
    assert warning.startswith("SmoothedForCausalLM returns a loss of its own")
    assert warning in caplog.text
    assert pruned(own(HandsOnForCausalLM), **bounded).report.warnings == []
    loss = {"loss_fn": lambda model, batch: model(**batch, labels=batch["input_ids"]).loss * len(batch["input_ids"])}
    assert pruned(own(SmoothedForCausalLM), **loss, **bounded).report.warnings == []


def test_more_predictions_than_tokens_are_refused():
    with pytest.raises(ValueError, match=r"predicts \[2, 16\] tokens of \[2, 12\].*Give a loss_fn"):
        pruned(own(LongerForCausalLM))


def test_an_encoder_is_no_language_model():
    config = BertConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(ValueError, match=r"config\.is_decoder is False"):
        pruned(BertLMHeadModel(config).eval())
    loss = {"loss_fn": lambda model, batch: model(batch["input_ids"]).logits.square().sum()}
    assert pruned(BertLMHeadModel(config).eval(), **loss).report.sparsity == pytest.approx(0.5, abs=1e-3)
    config.is_decoder = True
    assert pruned(BertLMHeadModel(config).eval()).report.sparsity == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("model", "config", "setting", "remedy"),
    [
        ("BertGenerationDecoder", {}, "is_decoder is False", "is_decoder=True"),
        (
            "XLNetLMHeadModel",
            {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
            "attn_type is 'bi'",
            "attn_type",
        ),
        ("XLMWithLMHeadModel", {"emb_dim": 32, "n_layers": 2, "n_heads": 4}, "causal is False", "causal=True"),
        ("CpmAntForCausalLM", {"dim_head": 8, "dim_ff": 64, "prompt_length": 4}, None, "Choose another model"),
    ],
)
def test_what_sees_ahead_by_its_settings_is_no_language_model(model, config, setting, remedy):
    """Their perplexities, of tokens that they are shown, were reported."""
    cls = getattr(transformers, model)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    built = cls(cls.config_class(vocab_size=256, **{**sizes, **config})).eval()
    why = "because it reads all of a text as what is known" if setting is None else rf"because config\.{setting}"
    include = {"include": ["transformer.layer.*"]} if model.startswith("XLNet") else {}  # its heads are no layers
    with pytest.raises(ValueError, match=f"sees those that it is to predict, {why}.*{remedy}"):
        pruned(built, **include)


class Boxes(PreTrainedModel):
    """Labels as DETR has them: a dict for each row."""

    config_class = BertConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.post_init()

    def forward(self, pixel_values=None, labels=None, **_):
        found = pixel_values
        for layer in self.layers:
            found = found + layer(found).relu()
        pairs = zip(found, labels, strict=True)
        losses = [(row.mean(0) - label["boxes"]).square().sum() for row, label in pairs]
        return CausalLMOutput(loss=torch.stack(losses).mean(), logits=found)


def boxes(seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(2, 5, 16, generator=images),
            "labels": [{"boxes": torch.randn(16, generator=generator)} for _ in range(2)],
        }
        for _ in range(4)
    ]


def test_labels_in_lists_of_dicts_are_part_of_the_batches():
    one, same, other = (from_iterable(boxes(seed), "boxes").fingerprint for seed in (1, 1, 2))
    assert one == same != other
    assert pruned(Boxes(BertConfig()).eval(), boxes(1), checkpointing=False).report.sparsity == 0.5


def test_how_a_model_is_called_is_no_part_of_a_batch():
    rows = cases.batches("llama")
    odd = [{**row, "use_cache": True, "return_dict": False} for row in rows]
    one, other = (pruned(cases.build("llama"), given) for given in (rows, odd))
    assert cases.differing(one.masks, other.masks) == 0
    with pytest.raises(ValueError, match="labels of a language model are tokens"):
        pruned(cases.build("llama"), [{**row, "labels": row["input_ids"].float()} for row in rows])


def test_the_callers_modes_change_nothing():
    plain = pruned(cases.build("llama")).masks
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cases.differing(pruned(cases.build("llama")).masks, plain) == 0
    model = cases.build("llama")
    with torch.inference_mode():
        assert cases.differing(pruned(model).masks, plain) == 0
    with torch.inference_mode():
        model = cases.build("llama")
    with pytest.raises(ValueError, match=r"made under torch\.inference_mode"):
        pruned(model)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_model_left_in_mixed_precision_is_pruned_in_its_own(hooked):
    """A Trainer with bf16=True leaves it so, and rounded copies of the weights would be measured. It stays so after."""
    model, plain = cases.build("llama"), cases.build("llama")
    if hooked:
        add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    AcceleratorState._reset_state()  # of a Trainer that ran before
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    AcceleratorState._reset_state()
    before = dict(vars(model))
    left, expected = (pruned(one, evaluation=cases.batches("llama"), apply=True) for one in (model, plain))
    assert cases.differing(left.masks, expected.masks) == 0
    assert left.report.evaluation == expected.report.evaluation
    options = {"text": cases.batches("llama"), "evaluation": False, "progress": False}
    for result in (left, expected):
        recover_pretrained(result, cases.build("llama"), RecoveryConfig(steps=1, batch_size=2, bf16=False), **options)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert {name: vars(model).get(name) for name in ("forward", "_original_forward")} == {
        name: before[name] for name in ("forward", "_original_forward")
    }
    ids = torch.arange(12)[None]
    assert not torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    with pytest.raises(ValueError, match="Accelerate has prepared this LlamaForCausalLM for mixed precision"):
        load_model(model)  # of a verb that leaves it so


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_a_model_compiled_in_place_keeps_its_graphs(whole):
    """A run would compile a graph for each of its hooks, until there are so many that torch leaves it without any."""
    model, graphs, ids = cases.build("llama"), [], torch.arange(12)[None]
    compiled = model if whole else model.model.layers[0]
    torch._dynamo.reset()
    compiled.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with torch.no_grad():
        model(input_ids=ids)
        before = list(graphs)
        left, expected = (pruned(one, apply=True) for one in (model, cases.build("llama")))
        assert graphs == before
        assert len(before) > 0
        assert cases.differing(left.masks, expected.masks) == 0
        assert torch.equal(model(input_ids=ids).logits, expected.model(input_ids=ids).logits)
    assert graphs == before, "compiled once more"
    assert compiled._compiled_call_impl is not None


def test_an_optimizer_of_a_copy_is_refused():
    model = pruned(cases.build("llama"), apply=True).model
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(ValueError, match="trains none of this"), keep_sparsity(model, optimizer):
        pass


def test_a_folder_whose_name_is_no_utf8_is_refused_before_any_work(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    with pytest.raises(ValueError, match="is not UTF-8"):
        pruned(cases.build("llama"), output_dir=folder)


def test_a_comparison_says_what_was_calibrated_on(tmp_path):
    rows = cases.batches("llama")
    found = compare_pretrained(
        cases.build("llama"), GradProbeConfig(**FAST), calibration=rows, evaluation=rows[:1], progress=False
    )
    assert found.warnings == ["2 of the 2 evaluation windows were also calibrated on; evaluate on others."]
    found.save(tmp_path)
    assert json.loads((tmp_path / "comparison.json").read_text())["warnings"] == found.warnings


def test_text_beside_token_ids_makes_no_row_of_a_batch():
    rows = [{**row, "text": ["a", "b"]} for row in cases.batches("llama")]
    result = prune_pretrained(
        cases.build("llama"), GradProbeConfig(**FAST), calibration=rows, evaluation=False, progress=False
    )
    assert result.report.calibration["protocol"] == "batches as given"


def test_a_head_that_was_given_weights_of_its_own_is_one_more_matrix(tmp_path):
    """Though the configuration says that it is tied: transformers loads both where they differ."""
    model = cases.build("tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    result = pruned(model, cases.batches("tied"), include=["lm_head"], apply=True, output_dir=tmp_path / "out")
    assert result.report.model["parameters"] == model.num_parameters()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert (model.lm_head.weight == 0).float().mean() == 0.5
    assert (model.model.embed_tokens.weight == 0).float().mean() < 0.1
