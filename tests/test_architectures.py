"""Every architecture of the table: what is pruned is used, and the page says what is seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gradprobe_hf.model.passes.block_cache import BlockOutputCache, BlockSequence
from gradprobe_hf.model.passes.loss import forward_only, summed_loss
from gradprobe_hf.model.passes.patches import frozen
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.steps import single_rows
from tests.architecture_page import PAGE, WAYS, line, seen
from tests.architectures import ARCHITECTURES

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
EACH = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)


@pytest.mark.slow
@EACH
def test_the_page_says_what_is_seen(architecture, tmp_path):
    written = PAGE.read_text(encoding="utf-8").splitlines()
    assert line(architecture, seen(architecture, tmp_path)) in written, "make architectures writes the page"


@pytest.mark.parametrize("name", ["SegFormer", "wav2vec 2.0", "LLaVA"])
def test_it_is_pruned_saved_loaded_and_run(name, tmp_path):
    seen(BY_NAME[name], tmp_path, ways=["`best`"])


def test_the_page_has_the_rows_of_the_table():
    written = PAGE.read_text(encoding="utf-8")
    shown = [row.split(" | ")[0].removeprefix("| ") for row in written.splitlines() if row.startswith("| ")]
    assert [name for name in shown if name != "architecture"] == [one.name for one in ARCHITECTURES]
    assert all(written.count(f"| {' | '.join(WAYS)} |") for one in ARCHITECTURES)


@EACH
def test_a_target_is_used_by_its_own_module_and_nowhere_else(architecture):
    model = architecture.build()
    targets = [target for target in find_targets(model) if target.expert is None]
    called = set()

    def forward(target, module):
        def run(x):
            called.add(target.name)
            weight = module.weight.detach()
            return F.linear(x, weight.t() if target.transposed else weight, module.bias)

        return run

    with frozen(model):
        for target in targets:
            model.get_parameter(target.parameter).requires_grad_()
            for site in target.sites:
                module = model.get_submodule(site.module)
                module.forward = forward(target, module)
        with torch.enable_grad():
            loss, _ = summed_loss(model, architecture.batches()[0])
        reached = (
            torch.autograd.grad(loss, [model.get_parameter(target.parameter) for target in targets], allow_unused=True)
            if loss.requires_grad
            else [None] * len(targets)
        )
    assert [target.name for target, gradient in zip(targets, reached, strict=True) if gradient is not None] == []
    assert called == {target.name for target in targets}


@EACH
def test_the_loss_of_a_batch_is_the_sum_of_those_of_its_rows(architecture):
    if architecture.name == "CLIP":
        pytest.skip("it compares the rows of a batch")
    model, batch = architecture.build(), architecture.batches()[0]
    with torch.no_grad():
        whole, terms = summed_loss(model, batch)
        rows = [summed_loss(model, row) for row in single_rows(model, batch)]
    torch.testing.assert_close(whole, sum(loss for loss, _ in rows))
    assert terms == sum(count for _, count in rows)


@EACH
def test_a_pass_from_finished_blocks_on_has_the_same_output(architecture):
    if architecture.refused:
        pytest.skip("its blocks do not follow on each other")
    model, batches = architecture.build(), architecture.batches(count=1)
    sequence = BlockSequence.of(model, find_targets(model), batches[0])
    with torch.no_grad():
        wanted = forward_only(model, batches[0])
    cache = BlockOutputCache(model, batches, sequence)
    for block in sequence.names:
        cache.advance([block])
        cache.start_batch(0)
        with torch.no_grad(), cache.skipping():
            assert torch.equal(forward_only(model, batches[0])[0], wanted[0]), block
