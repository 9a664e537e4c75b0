"""What the calibration does not reach is no target: neither pruned, nor paid for by what is."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest
import torch
from accelerate import disk_offload
from transformers import (
    BeitConfig,
    BeitForSemanticSegmentation,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MobileViTConfig,
    MobileViTForImageClassification,
)

from gradprobe_hf import GradProbeConfig, compare_pretrained, sweep_gradient_thresholds
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.cli import main
from gradprobe_hf.model.targets import covering_patterns, find_targets
from gradprobe_hf.report.card.build import build_card
from gradprobe_hf.report.plots import sparsity_grid
from tests import cases
from tests.launch import together
from tests.test_fsdp import sharded

IMAGE = 259  # the token that an image's patches take the place of


def llava(vision_layers=1):
    """A language model of two blocks, and a vision tower that is smaller unless it has many."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=vision_layers, num_attention_heads=4, image_size=8,
        patch_size=4,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, **cases.CAUSAL,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model


def texts(batches=3):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(256, (2, 12), generator=generator) for _ in range(batches)]
    return [{"input_ids": one, "labels": one.clone()} for one in ids]


def captions():
    """Texts that begin with the four patches of an image."""
    generator = torch.Generator().manual_seed(2)
    return [
        {
            **{name: torch.cat([torch.full((2, 4), fill), ids], 1) for name, ids, fill in _with_patches(batch)},
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
        }
        for batch in texts()
    ]


def _with_patches(batch):
    return ("input_ids", batch["input_ids"], IMAGE), ("labels", batch["labels"], -100)


def in_vision(name):
    return "vision" in name


def weights(model, chosen):
    return sum(target.numel for target in find_targets(model) if chosen(target.name))


@pytest.mark.parametrize(
    "options",
    [{}, {"probes": 1}, {"score": "wanda"}, {"preset": "best"}, {"update": "sparsegpt"}, {"checkpointing": True}],
    ids=str,
)
def test_text_alone_prunes_the_language_model_to_what_was_asked_and_nothing_else(options, caplog):
    model = llava()
    before = cases.bits(model)
    found = cases.prune(model, texts(), apply=True, **options)
    assert found.masks
    assert not any(map(in_vision, found.masks))
    assert not any(map(in_vision, cases.changed(model, before)))
    language = weights(model, lambda name: not in_vision(name))
    pruned = sum(int(mask.sum()) for mask in found.masks.values())
    assert pruned == pytest.approx(language / 2, abs=100), "not the whole model's budget, spent on a part of it"
    left_out = {one.name for one in found.report.unreached}
    assert left_out == {target.name for target in find_targets(model) if in_vision(target.name)}
    said = [record.message for record in caplog.records if "does not reach them" in record.message]
    assert len(said) == 1, "once, before the work"
    card = str(build_card(found.report, found.config, {}, "here"))
    assert "6 further matrices (6 in `model.vision_tower.encoder.layers`" in card


def test_what_reaches_everything_leaves_nothing_out(caplog):
    found = cases.prune(llava(), captions())
    assert any(map(in_vision, found.masks))
    assert found.report.unreached == []
    assert "does not reach" not in caplog.text


def test_every_batch_is_asked_before_a_matrix_is_left_out():
    assert cases.prune(llava(), [*texts(2), captions()[0]]).report.unreached == []


def test_one_batch_is_enough_where_it_reaches_everything():
    seen = []

    def loss(model, batch):
        seen.append(batch["input_ids"])
        logits = model(**batch).logits
        return logits.float().square().sum()

    batches = cases.batches("llama", rows=6, batch_size=2)
    cases.prune(cases.build("llama"), batches, probes=1, loss_fn=loss)
    assert len(seen) == 1 + len(batches)
    assert torch.equal(seen[0], batches[0]["input_ids"])


def test_a_method_that_reads_no_text_prunes_everything():
    found = cases.prune(llava(), None, score="magnitude")
    assert any(map(in_vision, found.masks))
    assert found.report.unreached == []


def test_less_than_half_is_an_error_that_names_a_pattern_which_works():
    model = llava(vision_layers=4)
    before = cases.bits(model)
    with pytest.raises(ValueError, match=r"reaches 14 of 38 matrices, \d+% of the weights") as refusal:
        cases.prune(model, texts(), apply=True)
    assert cases.changed(model, before) == []
    include = ["model.language_model.layers.*"]
    assert f"include={include}" in str(refusal.value)
    assert "--include 'model.language_model.layers.*'" in str(refusal.value)
    found = cases.prune(model, texts(), include=include)
    assert set(found.masks) == {target.name for target in find_targets(model) if not in_vision(target.name)}
    assert found.report.unreached == []


# Its embedding of positions, which is no target by default, is named with the six matrices of its block.
@pytest.mark.parametrize("include", [["*vision_tower*"], ["model.language_model.layers.*", "*vision_tower*"]])
def test_what_is_asked_for_by_name_has_to_be_reached(include):
    with pytest.raises(ValueError, match=r"no calibration batch reaches|depends on none of them"):
        cases.prune(llava(), texts(), include=include)
    with pytest.raises(ValueError, match=r"'\*vision_tower\*' asks for 7 matrices that no calibration batch reaches"):
        cases.prune(llava(), texts(), include=include, score="wanda")


def test_a_threshold_for_what_is_left_out_is_refused_before_the_probes():
    limits = {"*vision*": 0.1, "*": 0.2}
    with pytest.raises(ValueError, match="decides about no matrix"):
        cases.prune(llava(), texts(), rule="threshold", gradient_threshold=limits)


def first_two_blocks(model, batch):
    """A loss that the last of three blocks has no part in."""
    return model(**batch, output_hidden_states=True).hidden_states[2].square().sum()


def test_a_loss_of_ones_own_decides_what_is_reached():
    model = cases.build("llama")
    found = cases.prune(model, cases.batches("llama"), loss_fn=first_two_blocks)
    assert not any(".layers.2." in name for name in found.masks)
    assert len(found.report.unreached) == 7
    assert found.report.sparsity == pytest.approx(0.5, abs=1e-4)


def test_of_a_model_on_disk_the_same_is_reached(tmp_path):
    wanted = cases.prune(cases.build("llama"), cases.batches("llama"), loss_fn=first_two_blocks)
    model = cases.build("llama")
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    found = cases.prune(model, cases.batches("llama"), loss_fn=first_two_blocks)
    assert cases.differing(wanted.masks, found.masks) == 0
    assert found.report.unreached == wanted.report.unreached


def of_one(shards):
    """What a process leaves out, and what it prunes."""
    model = sharded("llama", torch.float32) if shards else cases.build("llama")
    found = cases.prune(model, cases.batches("llama", rows=8, batch_size=2), loss_fn=first_two_blocks, probes=1)
    return [one.name for one in found.report.unreached], found.report.zeros, found.processes.count


@pytest.mark.parametrize("shards", [False, True])
def test_processes_leave_out_the_same(shards):
    alone = cases.prune(
        cases.build("llama"), cases.batches("llama", rows=8, batch_size=2), loss_fn=first_two_blocks, probes=1
    )
    wanted = [one.name for one in alone.report.unreached], alone.report.zeros, 2
    assert together(of_one, shards) == [wanted, wanted]


def test_rows_of_a_comparison_and_of_a_sweep_are_of_what_is_reached():
    with_text = {"calibration": texts(), "evaluation": texts(1), "progress": False}
    configs = {name: GradProbeConfig(score=name) for name in ("magnitude", "wanda", "fisher")}
    language = weights(llava(), lambda name: not in_vision(name))
    compared = compare_pretrained(llava(), configs=configs, **with_text)
    assert [row.weights for row in compared.rows] == [language] * 3
    swept = sweep_gradient_thresholds(llava(), [0.0], **with_text)
    assert swept.rows[0].zeros <= language / 2 + 100


def test_inspection_counts_what_was_in_the_budget(tmp_path, capsys):
    found = cases.prune(llava(), texts(), pattern="2:4", output_dir=tmp_path / "out")
    seen = inspect_checkpoint(tmp_path / "out")
    assert {row.name for row in seen.rows} == set(found.masks)
    assert seen.patterns == ["2:4", "4:8"]
    assert seen.zeros == found.report.zeros
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "not counted: 6 matrices" in capsys.readouterr().out
    (tmp_path / "out" / "gradprobe_report.json").unlink()
    assert len(inspect_checkpoint(tmp_path / "out").rows) == len(seen.rows) + 6, "all, where nothing says otherwise"


def test_the_map_tells_towers_apart_and_what_is_left_out_from_what_is_empty():
    grid = sparsity_grid(cases.prune(llava(), texts()).report)
    assert "vision self_attn.q_proj" in grid.rows
    assert "text self_attn.q_proj" in grid.rows
    assert grid.columns == ["0", "1"]
    seen = grid.rows.index("vision self_attn.q_proj")
    assert grid.left_out[seen].tolist() == [True, False], "a tower of one block"
    assert np.isnan(grid.sparsity[seen]).all()
    assert not np.isnan(grid.sparsity[grid.rows.index("text self_attn.q_proj")]).any()
    both = sparsity_grid(cases.prune(llava(), captions()).report)
    assert not both.left_out.any()


@pytest.mark.parametrize(
    ("wanted", "others", "patterns"),
    [
        (["a.b.0.q", "a.b.1.q"], ["a.embed", "c.0.q"], ["a.b.*"]),
        (["a.0.q", "a.1.q"], ["a.0.k", "a.1.k"], ["a.*.q"]),
        (["a.0.q", "a.1.k"], ["a.0.k", "a.1.q"], ["a.0.q", "a.1.k"]),
        (["a.q"], [], ["a.*"]),
    ],
)
def test_patterns_cover_what_is_wanted_and_no_more(wanted, others, patterns):
    assert covering_patterns(wanted, [*wanted, *others]) == patterns


def test_a_block_that_the_loss_does_not_depend_on_is_no_reason_to_name_a_width():
    """BEiT's heads for segmentation read four blocks, and not always the last."""
    config = BeitConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=3,
        out_indices=[1, 2, 3, 5],
    )
    torch.manual_seed(0)
    model = BeitForSemanticSegmentation(config).eval()
    parts = [{"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 3, (2, 32, 32))} for _ in range(2)]
    with pytest.raises(ValueError, match=r"does not reach beit\.layers\.4, beit\.layers\.5, on whose output the loss"):
        cases.prune(model, parts, structure={"ffn": 8}, update="none")


def test_what_is_advised_where_most_can_never_go_names_all_that_can():
    """It named the first four kinds of attention, and a sixth of what could go went."""
    sizes = {"hidden_sizes": [16] * 3, "neck_hidden_sizes": [16, 16, 24, 48, 64, 80, 160], "num_attention_heads": 2}
    model = MobileViTForImageClassification(MobileViTConfig(image_size=64, **sizes))
    batch = {"pixel_values": torch.rand(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=r"To prune those, ask for them by name: include=\[") as refused:
        cases.prune(model, [batch], processing_class=None)
    named = ast.literal_eval(re.search(r"include=(\[.*\])", str(refused.value))[1])
    of_all = {target.name for target in find_targets(model)}
    assert {target.name for target in find_targets(model, include=named)} == of_all
