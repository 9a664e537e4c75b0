"""Callbacks in two real processes: DDP and FSDP2 end as one process does."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.training import (
    SelectiveUpdateCallback,
    SparsityCallback,
    SpikeAwareClip,
    StatePruningCallback,
    attached,
    keep_sparsity,
)
from tests import cases
from tests.grids import some
from tests.launch import together
from tests.test_fsdp import sharded, whole_state
from tests.trainers import Rows, arguments, half_pruned

CALLBACKS = {
    "sparsity": lambda masks: SparsityCallback(masks),
    "from zeros": lambda masks: SparsityCallback("from-zeros"),
    "state": lambda masks: StatePruningCallback(0.6, begin_step=2, end_step=4, every=1),
    "state by tensor": lambda masks: StatePruningCallback(0.6, "movement", 2, 4, 1, scope="tensor"),
    "selective": lambda masks: SelectiveUpdateCallback(top_k=2, every=2),
    "spikes": lambda masks: SpikeAwareClip(threshold=1.1, warmup=1, reset_every=4),
}


def prune(model, masks):
    with torch.no_grad():
        for target in find_targets(model):
            region = target.region(model)
            target.matrix(model).masked_fill_(masks[target.name][region.rows, region.columns], 0)


def run(model, trains, rows, case, masks):
    """Six steps over a process's rows; returns the whole model, and what the callback made of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    with attached(CALLBACKS[case](masks), trains, optimizer) as callback:
        for _ in range(6):
            trains(input_ids=rows, labels=rows).loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.5)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
            optimizer.zero_grad()
    history = [(update.step, update.zeros) for update in getattr(callback, "history", [])]
    return {"state": whole_state(model), "norms": norms, "chosen": getattr(callback, "counts", {}), "history": history}


def setting(name, case=""):
    model, masks = half_pruned("llama", torch.float64)
    # Zeros that a callback begins with have no moments: all move as far in their first step, and rounding decides.
    is_dense = case == "state by tensor"
    if is_dense:
        model = cases.build("llama", torch.float64)
    rows = torch.stack([Rows()[index]["input_ids"] for index in range(4)])
    if name == "fsdp":
        model = sharded("llama")
        if not is_dense:
            prune(model, masks)
    return model, masks, rows


def in_ddp(case):
    model, masks, rows = setting("ddp", case)
    rank = torch.distributed.get_rank()
    return run(model, DistributedDataParallel(model), rows[rank * 2 : rank * 2 + 2], case, masks)


def in_shards(case):
    model, masks, rows = setting("fsdp", case)
    rank = torch.distributed.get_rank()
    return run(model, model, rows[rank * 2 : rank * 2 + 2], case, masks)


# What DDP does to a gradient is the same for every callback; shards are not.


@some("case", CALLBACKS, fast=("state by tensor", "spikes"))
def test_two_processes_with_shards_end_as_one(case):
    check_two_processes(case, "fsdp")


@some("case", CALLBACKS, fast=("state",))
def test_two_processes_with_whole_models_end_as_one(case):
    check_two_processes(case, "ddp")


def check_two_processes(case, kind):
    model, masks, rows = setting("one", case)
    expected = run(model, model, rows, case, masks)
    first, second = together(in_ddp if kind == "ddp" else in_shards, case)
    for key, value in expected["state"].items():
        torch.testing.assert_close(first["state"][key], value, rtol=1e-6, atol=1e-9, msg=key)
        assert torch.equal(first["state"][key], second["state"][key]), key
        assert torch.equal(first["state"][key] == 0, value == 0), key
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    assert first["chosen"] == expected["chosen"]
    zeros = [sum(parts) for parts in zip(*([z for _, z in one["history"]] for one in (first, second)), strict=True)]
    assert zeros == [(1 if kind == "fsdp" else 2) * count for _, count in expected["history"]]


def in_uneven_shards():
    model, masks, rows = setting("fsdp")
    return run(model, model, rows, "state", masks)


def test_uneven_shards_choose_what_one_process_does():
    """Sixteen rows over three processes: six, six and four. All see the same batch, so that its mean is the same."""
    model, masks, rows = setting("one")
    expected = run(model, model, rows, "state", masks)
    found = together(in_uneven_shards, processes=3)
    assert len({one["history"][-1][1] for one in found}) > 1, "the shards differ"
    assert [sum(counts) for counts in zip(*([z for _, z in one["history"]] for one in found), strict=True)] == [
        count for _, count in expected["history"]
    ]
    for key, value in expected["state"].items():
        torch.testing.assert_close(found[0]["state"][key], value, rtol=1e-6, atol=1e-9, msg=key)
        assert torch.equal(found[0]["state"][key] == 0, value == 0), key


def trains_in_ddp(folder):
    model, masks = half_pruned("llama")
    callback = SparsityCallback(masks)
    Trainer(
        model,
        arguments(folder, save_strategy="steps", save_steps=3, ddp_backend="gloo"),
        train_dataset=Rows(),
        callbacks=[callback],
    ).train()
    targets = {target.name: target for target in find_targets(model)}
    return {
        "under": sum(int((targets[name].matrix(model)[mask] != 0).sum()) for name, mask in masks.items()),
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "steps": callback.step,
    }


def test_a_trainer_in_two_processes_keeps_the_zeros(tmp_path):
    first, second = together(trains_in_ddp, tmp_path)
    assert first["under"] == second["under"] == 0
    assert first["steps"] == 6
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    assert (tmp_path / "checkpoint-3" / "gradprobe_masks.safetensors").exists()


def keeps_files(folder):
    model = sharded("llama")
    _, masks = half_pruned("llama", torch.float64)
    prune(model, masks)
    optimizer = torch.optim.AdamW(model.parameters())
    with keep_sparsity(model, optimizer) as keeper:
        keeper.save(folder)
    again = SparsityCallback("from-zeros")
    with attached(again, model, optimizer):
        again.restore(folder)
        return again.keeper.zeros, keeper.zeros, keeper.nbytes


def test_every_shard_keeps_its_own_masks(tmp_path):
    found = together(keeps_files, tmp_path)
    assert [restored for restored, _, _ in found] == [zeros for _, zeros, _ in found]
    total = sum(target.numel for target in find_targets(cases.build("llama")))
    assert sum(zeros for _, zeros, _ in found) == total // 2
    assert sum(nbytes for _, _, nbytes in found) == pytest.approx(total / 8, rel=0.05)
    assert len(list(tmp_path.iterdir())) == 2
