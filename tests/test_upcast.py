"""Products of half precision on a CPU that has no units for them."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.data.text.self_generated import own_text
from gradprobe_hf.estimation.passes import cost_of_batch
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.passes import upcast
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.passes.upcast import native_products, upcast_products
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.shapes.latency import _Subject
from tests import cases
from tests.grids import grid

HALF = (torch.bfloat16, torch.float16)
# Every operation that torch itself counts as products, those of experts, and the CPU's attention.
COUNTED = {
    *flop_registry,
    torch.ops.aten.linear,
    torch.ops.aten.matmul,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten._grouped_mm,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
}


class Products(TorchDispatchMode):
    """The dtypes of the operands of all products, as they arrive at the CPU when this is entered first."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in COUNTED:
            self.dtypes |= {one.dtype for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.fixture
def without_units(monkeypatch):
    monkeypatch.setattr(upcast, "needs_upcast", HALF.__contains__)


@pytest.fixture
def with_units(monkeypatch):
    monkeypatch.setattr(upcast, "needs_upcast", lambda _: False)


def gradients(model, batch):
    model.zero_grad()
    summed_loss(model, batch)[0].backward()
    return {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}


def error(found, exact):
    return sum(float((found[name] - exact[name]).square().sum()) for name in exact) ** 0.5


@grid("name, dtype", list(cases.CASES), dict(zip(("bfloat16", "float16"), HALF, strict=True)))
def test_gradients_are_as_near_to_float32_as_those_of_half_precision(name, dtype, without_units, monkeypatch):
    """The weights are the same numbers in all three."""
    monkeypatch.setattr(upcast, "_FEW_ROWS", 0)
    half, batches = cases.build(name, dtype), cases.batches(name)
    whole = cases.build(name)
    whole.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    native, widened = [], []
    for batch in batches:
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        wide = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
        exact = gradients(whole, wide)
        native.append(error(gradients(half, inputs), exact))
        with Products() as heard, upcast_products(half):
            found = gradients(half, inputs)
        widened.append(error(found, exact))
        assert found.keys() == exact.keys()
        assert heard.dtypes
        assert not heard.dtypes & set(HALF)
    assert all(parameter.grad is None or parameter.grad.dtype == dtype for parameter in half.parameters())
    assert sum(widened) <= 2 * sum(native)
    assert min(widened) > 0  # it is rounded where half precision rounds


def test_under_inference_mode_as_well(without_units):
    model, batch = cases.build("llama", torch.bfloat16), cases.batches("llama")[0]
    with Products() as heard, upcast_products(model), torch.inference_mode():
        logits = model(**batch).logits
    assert heard.dtypes
    assert not heard.dtypes & set(HALF)
    assert logits.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_has_products_as_its_parts(mode, without_units):
    model = cases.build("llama", torch.bfloat16)
    a, b = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    convolution = torch.nn.Conv1d(8, 8, 3, padding="same", dtype=torch.bfloat16)
    for action in (lambda: torch.einsum("ij,kj->ik", a, b), lambda: torch.inner(a, b), lambda: convolution(a[None])):
        with Products() as heard, upcast_products(model), mode():
            assert action().dtype == torch.bfloat16
        assert heard.dtypes == {torch.float32}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [False, True])
def test_a_few_rows_are_left_to_torch(bias, mode, without_units, monkeypatch):
    """What a model writes token by token, in few sequences at once."""
    model = cases.build("llama", torch.bfloat16)
    linear = torch.nn.Linear(8, 16, bias=bias, dtype=torch.bfloat16)
    for large, most in ((False, 4), (True, 12)):
        monkeypatch.setattr(upcast, "_LARGE_COPY", 4 * linear.weight.numel() - large)
        for rows, dtype in {most: torch.bfloat16, most + 1: torch.float32}.items():
            with Products() as heard, upcast_products(model), mode():
                linear(torch.randn(rows, 1, 8, dtype=torch.bfloat16))
            assert heard.dtypes == {dtype}


def test_nothing_changes_where_there_are_units(with_units):
    model = cases.build("llama", torch.bfloat16)
    with upcast_products(model):
        assert not _get_current_dispatch_mode_stack()
    assert upcast.upcast_note(model) is None


def test_nothing_changes_for_float32(without_units):
    model = cases.build("llama")
    with upcast_products(model):
        assert not _get_current_dispatch_mode_stack()
    assert upcast.upcast_note(model) is None
    with upcast_products(model, autocast=torch.bfloat16):
        assert len(_get_current_dispatch_mode_stack()) == 1


def test_nor_for_a_model_that_computes_elsewhere(without_units):
    model = cases.build("llama", torch.bfloat16)
    with upcast_products(model, device=torch.device("cuda")):
        assert not _get_current_dispatch_mode_stack()


def test_once_is_enough(without_units):
    model = cases.build("llama", torch.bfloat16)
    with upcast_products(model), upcast_products(model):
        assert len(_get_current_dispatch_mode_stack()) == 1


def test_what_cpus_have_is_asked_of_torch():
    assert upcast.needs_upcast(torch.bfloat16) == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert upcast.needs_upcast(torch.float16) == (not torch.ops.mkldnn._is_mkldnn_fp16_supported())
    assert not upcast.needs_upcast(torch.float32)


@pytest.mark.parametrize("dtype", HALF)
def test_a_torch_without_onednn_has_nothing_but_the_loop(dtype, monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert upcast.needs_upcast(dtype)
    assert not upcast.needs_upcast(torch.float32)


TEXT = ("Of plain sentences this is one, and the next is much like it. " * 40).split(". ") * 6
OTHER_TEXT = [f"Here is number {number} of the sentences that none of them has." for number in range(40)]


def test_a_run_computes_in_float32_and_says_so(without_units, tmp_path):
    """Probe, reconstruction, evaluation and recovery."""
    model, tokenizer = cases.build("llama", torch.bfloat16), cases.tokenizer()
    config = GradProbeConfig(sparsity=0.5, num_samples=4, sequence_length=16, evaluation_samples=2, recovery_steps=2)
    with Products() as heard:
        prune_pretrained(
            model,
            config,
            calibration=TEXT,
            evaluation=OTHER_TEXT,
            processing_class=tokenizer,
            output_dir=tmp_path / "made",
            progress=False,
        )
    assert heard.dtypes
    assert not heard.dtypes & set(HALF)
    written = json.loads((tmp_path / "made" / "gradprobe_report.json").read_text())
    assert written["execution"]["products"] == "in float32, because this CPU has no units for bfloat16"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not _get_current_dispatch_mode_stack()


def test_autocast_of_a_recovery_is_upcast_too(without_units):
    """Of a model in float32 that is trained in bfloat16: weights say nothing of what it computes in."""
    dense = cases.build("llama")
    pruned = cases.prune(cases.build("llama"), cases.batches("llama"), apply=True, sparsity=0.5).model
    config = RecoveryConfig(steps=2, batch_size=2, sequence_length=16, bf16=True)
    with Products() as heard:
        recover_pretrained(
            pruned, dense, config, text=TEXT, evaluation=False, processing_class=cases.tokenizer(), progress=False
        )
    assert torch.float32 in heard.dtypes
    assert not heard.dtypes & set(HALF)


def test_own_text_and_the_verb_that_measures(without_units, checkpoint, text_file, capsys):
    model = cases.build("llama", torch.bfloat16)
    with Products() as heard:
        own_text(model, samples=5, length=8, begins=[1], seed=0, progress=False)
        main(["evaluate", str(checkpoint), "--data", str(text_file), "--dtype", "bfloat16", "--sequence-length", "16"])
    assert heard.dtypes
    assert not heard.dtypes & set(HALF)
    assert "perplexity" in capsys.readouterr().out


def test_what_users_wait_for_is_timed_as_it_is(without_units):
    model = cases.build("llama", torch.bfloat16)
    seen = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: seen.append(_get_current_dispatch_mode_stack()))
    with upcast_products(model):
        _Subject(model, 8).time()
        with native_products():
            assert not _get_current_dispatch_mode_stack()
        assert len(_get_current_dispatch_mode_stack()) == 1
    hook.remove()
    assert seen
    assert not any(seen)


def test_what_is_widened_is_in_the_estimate(monkeypatch):
    """Of a forward pass: the logits are the largest, and are there in float32 while they are rounded."""
    dense, cost = cases.build("llama", torch.bfloat16), {}
    for widened in (False, True):
        monkeypatch.setattr(upcast, "needs_upcast", lambda dtype, widened=widened: widened and dtype in HALF)
        model = skeleton(dense.config, type(dense), torch.bfloat16)
        asked = partial(cost_of_batch, model, find_targets(model), 2, 32, backward=False)
        cost[widened] = asked(device=torch.device("cpu"))
        assert cost[widened].simulated
        with upcast_products(dense):  # as a run asks
            assert asked(device=torch.device("cpu")) == cost[widened]
        assert asked(device=torch.device("cuda")) == cost[False]
    logits = 2 * 32 * cases.VOCABULARY
    assert cost[True].flops == cost[False].flops
    assert cost[True].peak_bytes == cost[False].peak_bytes + 4 * logits


def test_a_metric_of_the_dense_model_is_measured_like_those_it_is_compared_with(without_units):
    seen = []

    def metric(model):
        seen.append(len(_get_current_dispatch_mode_stack()))
        return 1.0

    cases.prune(
        cases.build("llama", torch.bfloat16),
        cases.batches("llama"),
        metric_fn=metric,
        max_metric_drop=0.5,
        sparsity=0.5,
    )
    assert set(seen) == {1}


def test_a_teacher_and_a_student_of_two_dtypes(without_units):
    dense = cases.build("llama")
    pruned = cases.prune(cases.build("llama"), cases.batches("llama"), apply=True, sparsity=0.5).model
    config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16, evaluation_samples=2)
    with Products() as heard:
        recover_pretrained(
            pruned.to(torch.bfloat16),
            dense,
            config,
            text=TEXT,
            evaluation=OTHER_TEXT,
            processing_class=cases.tokenizer(),
            progress=False,
        )
    assert heard.dtypes
    assert not heard.dtypes & set(HALF)


def test_a_model_can_be_let_go_in_the_body(without_units):
    model = cases.build("llama", torch.bfloat16)
    seen = weakref.ref(model)
    with upcast_products(model):
        del model
        gc.collect()
        assert seen() is None
