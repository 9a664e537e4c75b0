"""`inspect` counts what is in the files."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.model.targets import find_targets
from tests import cases


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_it_counts_the_zeros_of_the_files(name, shard, tmp_path):
    model = cases.build(name)
    with torch.no_grad():
        for i, target in enumerate(find_targets(model)):
            target.matrix(model)[: i % 5] = 0
    model.save_pretrained(tmp_path, max_shard_size=shard)
    found = inspect_checkpoint(tmp_path)
    targets = {target.name: target for target in find_targets(model)}
    assert {row.name for row in found.rows} == set(targets)
    for row in found.rows:
        assert row.zeros == int((targets[row.name].matrix(model) == 0).sum())
        assert row.shape == targets[row.name].shape
    assert sum(group.zeros for group in found.by("block")) == found.zeros == sum(g.zeros for g in found.by("role"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_sees_a_pattern_along_the_inputs(name, tmp_path):
    model = cases.build(name)
    cases.prune(model, cases.batches(name), apply=True, pattern="2:4", output_dir=tmp_path / "a")
    assert inspect_checkpoint(tmp_path / "a").patterns == ["2:4", "4:8"]
    model = cases.build(name)
    cases.prune(model, cases.batches(name), apply=True, output_dir=tmp_path / "b")
    assert inspect_checkpoint(tmp_path / "b").patterns == []


def test_it_looks_where_the_configuration_says(tmp_path):
    options = {"include": ["lm_head"], "sparsity": 0.25, "output_dir": tmp_path / "a"}
    cases.prune(cases.build("tied"), cases.batches("tied"), apply=True, **options)
    found = inspect_checkpoint(tmp_path / "a")
    assert [row.name for row in found.rows] == ["model.embed_tokens.weight"]
    assert found.sparsity == 0.25


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        inspect_checkpoint(tmp_path)
    cases.build("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no safetensors weights"):
        inspect_checkpoint(tmp_path)


def test_it_says_what_the_run_left_dense(tmp_path):
    options = {"exclude": ["down_proj"], "pattern": "2:4", "output_dir": tmp_path / "a"}
    cases.prune(cases.build("llama"), cases.batches("llama"), apply=True, **options)
    found = inspect_checkpoint(tmp_path / "a")
    assert {name.split(".")[-2] for name in found.excluded} == {"down_proj"}
    assert found.to_dict()["excluded"] == list(found.excluded)
    assert len(found.rows) + len(found.excluded) == len(find_targets(cases.build("llama")))


def test_it_reads_what_transformers_loads(tmp_path):
    """A file before an index: `save_pretrained` leaves that of an earlier one in shards, whose files it removes."""
    model = cases.build("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    with torch.no_grad():
        for target in find_targets(model):
            target.matrix(model)[::2] = 0
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert inspect_checkpoint(tmp_path).sparsity == pytest.approx(0.5, abs=0.05)
