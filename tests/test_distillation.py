"""Training towards the dense model: the loss is what formulas say, a step is masked Adam, the best state is kept."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Trainer,
)

from gradprobe_hf import RecoveryConfig, recover_pretrained
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.mixture import shares
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.evaluation.divergence_loss import SummedDivergence, TopPredictions, WholePredictions
from gradprobe_hf.model.passes.loss import LOGITS_AT_ONCE
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.recovery.distil import _whole_steps, teacher_of
from gradprobe_hf.recovery.teacher import LiveTeacher
from gradprobe_hf.recovery.text import Reading, RecoveryText, collated, read_text
from gradprobe_hf.recovery.trainer import BestState, evaluating, without_dropout
from gradprobe_hf.runtime.plain_computation import plain_computation
from gradprobe_hf.runtime.processes import Processes, join_processes
from tests import cases
from tests.distillation import DENSE, kl_of, place, text, trained
from tests.grids import grid
from tests.launch import together
from tests.trainers import half_pruned, hooks_of, weights, zeros


def test_the_loss_is_torchs_divergence_over_the_tokens_that_count():
    dense = cases.build(DENSE, torch.float64)
    pruned, _ = half_pruned(DENSE, torch.float64)
    batch = collated(text().trained[:3])
    assert not batch["attention_mask"].all()
    counted = (batch["shift_labels"] != -100).flatten()
    logits = pruned(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.flatten(0, 1)
    loss = SummedDivergence.apply(logits, LiveTeacher(dense).predictions(batch), counted) / counted.sum()
    wanted, count = kl_of(dense, pruned, batch)
    assert count == counted.sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(one, list(pruned.parameters()), retain_graph=True) for one in (loss, wanted)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("k", [1, 5, 19, 20])
def test_the_rest_of_the_tokens_is_one_outcome(k, monkeypatch):
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 3 * 20)  # 3 rows, 3, and 1
    generator = torch.Generator().manual_seed(k)
    p, z = (torch.randn(7, 20, dtype=torch.float64, generator=generator) for _ in range(2))
    z.requires_grad_(True)
    counted = torch.tensor([True, True, False, True, True, True, True])
    value = SummedDivergence.apply(z, TopPredictions.of(p, k), counted)
    wanted = 0
    for t in counted.nonzero().flatten().tolist():
        dense, mine = p[t].softmax(0), z[t].softmax(0)
        top = dense.argsort(descending=True)[:k].tolist()
        others = [v for v in range(20) if v not in top]
        wanted = wanted + sum(dense[v] * (dense[v].log() - mine[v].log()) for v in top)
        if others:
            wanted = wanted + dense[others].sum() * (dense[others].sum().log() - mine[others].sum().log())
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
    mine, other = (torch.autograd.grad(one, z, retain_graph=True)[0] for one in (value, wanted))
    torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-12)
    whole = SummedDivergence.apply(z, WholePredictions(p), counted)
    assert 0 <= value <= whole + 1e-12
    assert (k >= 19) == torch.isclose(value, whole, rtol=1e-9).item()


def test_what_is_written_to_disk_is_what_the_dense_model_predicts(tmp_path):
    dense, rows = cases.build(DENSE), text()
    pruned, _ = half_pruned()
    with place(tmp_path / "run") as here:
        config = RecoveryConfig(teacher_top_k=9, batch_size=2)
        from_disk = teacher_of(dense, rows, config, here)
        batch = collated(rows.kept_back)
        ids = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        exact = TopPredictions.of(LiveTeacher(dense).logits(batch), 9)
        counted = (batch["shift_labels"] != -100).flatten()
        logits = pruned(**ids).logits.flatten(0, 1).detach()
        read = from_disk.predictions(batch)
        assert torch.equal(read.ids[counted].long(), exact.ids[counted])
        whole = read.log_p.exp().sum(-1) + read.log_rest.exp()
        torch.testing.assert_close(whole[counted], torch.ones(int(counted.sum())), rtol=1e-6, atol=0)
        values = [SummedDivergence.apply(logits, one, counted) for one in (read, exact)]
        torch.testing.assert_close(*values, rtol=2e-3, atol=0)
        dense.forward = None  # a second time nothing is computed
        assert torch.equal(teacher_of(dense, rows, config, here).predictions(batch).log_p, read.log_p)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_is_one_of_adam_on_masked_gradients(parts):
    dense = cases.build(DENSE)
    student, masks = half_pruned()
    by_hand, rows = copy.deepcopy(student), text()
    # The rows of the step are those that Trainer's sampler draws: all of them.
    count = len(rows.trained)
    trained(student, dense, rows, steps=1, batch_size=count, warmup_steps=0, gradient_accumulation_steps=parts)
    kept = {target.name: ~masks[target.name] for target in find_targets(by_hand) if target.name in masks}
    loss, _ = kl_of(dense, by_hand, collated(rows.trained))
    loss.backward()
    for target in find_targets(by_hand):
        gradient = by_hand.get_parameter(target.parameter).grad
        target.view(gradient).mul_(kept[target.name])
    torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
    for parameter in by_hand.parameters():
        first, second = 0.1 * parameter.grad, 0.05 * parameter.grad**2
        step = (first / 0.1) / ((second / 0.05).sqrt() + 1e-8)
        parameter.data -= 1e-2 * step
    for (name, mine), wanted in zip(student.named_parameters(), by_hand.parameters(), strict=True):
        # Where a gradient is next to nothing its sign decides, and rounding decides that.
        sure = wanted.grad.abs() > 1e-6
        torch.testing.assert_close(mine[sure], wanted[sure], rtol=1e-4, atol=1e-5, msg=name)
    assert zeros(student, masks) == (0, 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"teacher_top_k": 20}, {"lora_r": 2}, {"bf16": True}, {"gradient_checkpointing": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_model_gets_nearer_to_the_dense_one_with_its_zeros(options):
    dense = cases.build(DENSE)
    student, masks = half_pruned()
    before, config = weights(student), copy.deepcopy(student.config.to_dict())
    found = trained(student, dense, steps=12, learning_rate=5e-3, eval_steps=4, **options)
    assert found.held_out[found.best_step] < 0.97 * found.held_out[0]
    assert zeros(student, masks) == (0, 0)
    assert type(student).__name__ == "LlamaForCausalLM"
    assert student.config.to_dict() == config
    assert not hooks_of(student)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in student.parameters())
    assert weights(student).keys() == before.keys()


@pytest.mark.parametrize("parts", [1, 4])
def test_what_is_held_out_is_measured_by_token_however_it_is_batched(parts):
    dense = cases.build(DENSE)
    student, _ = half_pruned()
    rows = text((12, 3, 3, 12, 5, 4) * 9, held_out=5)
    wanted, _ = kl_of(dense, student, collated(rows.kept_back))
    found = trained(student, dense, rows, steps=1, batch_size=4, gradient_accumulation_steps=parts)
    assert found.held_out[0] == pytest.approx(wanted.item(), rel=1e-5)


@grid(
    "trained_as, options",
    {"float32": (torch.float32, 5e-3), "bfloat16": (torch.bfloat16, 5e-3), "rounded away": (torch.bfloat16, 1e-4)},
    {"whole": {}, "adapters": {"lora_r": 2}},
)
def test_what_rounding_takes_of_a_recovery_is_told(trained_as, options):
    dtype, rate = trained_as
    dense, (student, _) = cases.build(DENSE, dtype), half_pruned(DENSE, dtype)
    rows = text((12, 3, 3, 12, 5, 4) * 9, held_out=5)
    found = trained(student, dense, rows, steps=12, learning_rate=rate, eval_steps=4, bf16=False, **options)
    wanted, _ = kl_of(dense, student, collated(rows.kept_back))
    assert found.held_out_as_left == pytest.approx(wanted.item(), rel=1e-5 if dtype == torch.float32 else 2e-3)
    # Steps of a ten-thousandth are lost in eight bits, and so is what they gained.
    is_lost = dtype == torch.bfloat16 and rate == 1e-4
    best = found.held_out[found.best_step]
    assert (found.held_out_as_left - best > 0.1 * (found.held_out[0] - best)) == is_lost
    assert ("With dtype=float32 (--dtype float32) less is lost by rounding" in " ".join(found.warnings)) == is_lost


def test_windows_without_a_token_that_counts_are_left_out():
    whole = text(held_out=1).rows
    silent = {3, len(whole) - 1}  # one of those that are trained on, and one that would be held out
    labels = [
        torch.full_like(row["input_ids"], -100) if n in silent else row["input_ids"] for n, row in enumerate(whole)
    ]
    batches = [
        {"input_ids": row["input_ids"][None], "labels": one[None]} for row, one in zip(whole, labels, strict=True)
    ]
    rows = RecoveryText.of(Batches(tuple(batches), "chats", len(batches), 0, "chats"), 1)
    assert len(rows.rows) == len(whole) - 2
    found = trained(half_pruned()[0], cases.build(DENSE), rows, batch_size=1)
    assert all(map(math.isfinite, found.held_out.values()))


def test_zeros_of_what_no_run_prunes_stay():
    """Mamba's fused kernels read past the module what it computes with, and its convolution is none of ours."""
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, **cases.CAUSAL)
    torch.manual_seed(0)
    dense = MambaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in dense.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    student = copy.deepcopy(dense)
    names = [f"backbone.layers.0.mixer.{name}" for name in ("conv1d.weight", "dt_proj.weight", "in_proj.weight")]
    with torch.no_grad():
        for name in names:
            student.get_parameter(name)[::2] = 0
    before = weights(student)
    trained(student, dense, steps=4, learning_rate=1e-3)
    for name in names:
        assert torch.equal(student.get_parameter(name) == 0, before[name] == 0), name
        assert not torch.equal(student.get_parameter(name), before[name]), name


def test_adapters_of_a_model_without_zeros_are_on_all_blocks():
    dense = cases.build(DENSE)
    student = copy.deepcopy(dense)
    with torch.no_grad():
        student.model.embed_tokens.weight[258] = 0  # as that of a padding token is made
        student.model.layers[0].self_attn.q_proj.weight.mul_(2)
    before = weights(student)
    trained(student, dense, steps=20, eval_steps=2, lora_r=4, warmup_steps=0, learning_rate=1e-3)
    changed = {name for name, value in weights(student).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".layers." in name and "norm" not in name}


def test_batches_whose_rows_are_more_than_tokens_are_refused():
    model, dense = half_pruned()[0], cases.build(DENSE)
    ids = torch.randint(256, (4, 16))
    batches = [{"input_ids": ids, "position_ids": torch.arange(8).repeat(4, 2)}]
    with pytest.raises(ValueError, match="without the position_ids of these batches"):
        recover_pretrained(model, dense, text=batches, evaluation=False, progress=False)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(8, 8).tril().bool().expand(4, 1, 8, 8), "a number for each token"),
        (torch.tensor([1, 1, 0, 1])[:, None].expand(4, 8), "zeros alone"),
    ],
    ids=["of pairs", "of nothing"],
)
def test_masks_that_leave_no_row_of_tokens_are_refused(mask, said):
    rows = [{"input_ids": torch.arange(32).view(4, 8), "attention_mask": mask}]
    with pytest.raises(ValueError, match=said):
        read_text(rows, RecoveryConfig(steps=1), Reading(cases.build("llama"), None, Processes(), False))


def test_dropout_is_off_and_types_are_their_own():
    dense = cases.build("gpt2", torch.bfloat16)
    student, masks = half_pruned("gpt2", torch.bfloat16)
    found = trained(student, dense, steps=8, learning_rate=5e-3)
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    assert zeros(student, masks)[0] == 0
    assert found.held_out[found.best_step] < found.held_out[0]
    assert student.transformer.drop.p == 0.1
    # Were dropout on, a model that is the dense one would be far from it.
    same = copy.deepcopy(dense)
    with torch.no_grad():
        same.transformer.h[0].mlp.c_fc.weight[0, 0] = 0
    seen = []
    trainer_step, Trainer.training_step = (
        Trainer.training_step,
        lambda self, *args, **kwargs: seen.append(float(trainer_step(self, *args, **kwargs))) or torch.tensor(seen[-1]),
    )
    try:
        trained(same, dense, steps=1, warmup_steps=1)
    finally:
        Trainer.training_step = trainer_step
    assert seen[0] < 1e-2


def test_routers_and_layers_are_those_of_evaluation():
    model, ids = cases.build("mixtral"), torch.arange(12)[None]
    for block in model.model.layers:
        block.mlp.jitter_noise = 0.5
    with torch.no_grad(), without_dropout(model):
        wanted = model.eval()(input_ids=ids).logits
        assert torch.equal(model.train()(input_ids=ids).logits, wanted)
    assert model.model.layers[0].mlp.jitter_noise == 0.5


RANDOM = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
IN_TRAINING = {
    "experts that are drawn": lambda: PhimoeForCausalLM(
        PhimoeConfig(**RANDOM, intermediate_size=32, num_key_value_heads=2, num_local_experts=4)
    ),
    "numbers of the configuration": lambda: FalconForCausalLM(
        FalconConfig(**RANDOM, hidden_dropout=0.3, attention_dropout=0.3)
    ),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", IN_TRAINING)
def test_a_step_computes_what_an_evaluation_does(name, recomputes):
    torch.manual_seed(0)
    model, ids = IN_TRAINING[name](), torch.randint(256, (4, 20))
    wanted = model.eval()(input_ids=ids, use_cache=False).logits
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with without_dropout(model):
        model.train()  # as Trainer does before each step
        evaluating(model)
        logits = model(input_ids=ids, use_cache=False).logits
        logits.sum().backward()
    torch.testing.assert_close(logits, wanted)
    assert any(block.training for block in model.modules()) == recomputes
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "expert" not in name)


def test_the_best_state_is_kept_and_the_beginning_is_one():
    dense = cases.build(DENSE)
    student, _ = half_pruned()
    before = weights(student)
    found = trained(student, dense, steps=9, learning_rate=5.0, eval_steps=1, early_stopping_patience=2, warmup_steps=0)
    assert found.best_step == 0
    assert found.steps == 2, "it stops when two measurements were no better"
    assert all(torch.equal(value, before[name]) for name, value in weights(student).items())
    assert "Try a lower learning_rate" in found.warnings[0]


@pytest.mark.parametrize(
    ("measured", "stops"),
    [
        ([0.37, 0.45, 0.42, 0.41], False),  # all worse than the beginning, and on the way down
        ([0.37, 0.45, 0.46], True),
        ([0.37, 0.36, 0.36], False),
        ([0.37, 0.36, 0.36, 0.36], True),
        ([0.37, float("nan"), float("nan")], True),
        ([0.37], False),
    ],
)
def test_what_falls_is_let_go_on(measured, stops, tmp_path):
    steps = {5 * number: value for number, value in enumerate(measured)}
    assert BestState(tmp_path, patience=2).has_waited(steps) == stops


@pytest.mark.parametrize(("launched", "bf16"), [("no", True), ("bf16", True), ("bf16", False)])
def test_what_trained_in_bfloat16_computes_as_what_was_saved(launched, bf16, tmp_path, monkeypatch):
    """Autocast is around the forward while it trains, and no longer; what a launch, or the caller's own Accelerator,
    asks for is none of its business, and stays."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    compared = set()
    apply = SummedDivergence.apply

    def trains(logits):
        if logits.requires_grad:
            compared.add(logits.dtype)

    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    monkeypatch.setattr(SummedDivergence, "apply", lambda z, *given: trains(z) or apply(z, *given))
    (student, _), dense, ids = half_pruned(), cases.build(DENSE), torch.arange(12)[None]
    found = recover_pretrained(
        student,
        dense,
        RecoveryConfig(steps=2, batch_size=2, bf16=bf16),
        text=[{"input_ids": torch.arange(12)[None] + row} for row in range(12)],
        evaluation=False,
        output_dir=tmp_path / "out",
        progress=False,
    )
    # Accelerate would make float32 of all logits: they stay as they were computed, in half of the memory.
    assert compared == {torch.bfloat16 if bf16 else torch.float32}
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator.mixed_precision == Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == launched
    AcceleratorState._reset_state()
    GradientState._reset_state()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(found.model.eval()(input_ids=ids).logits, saved(input_ids=ids).logits)
    assert not {"forward", "_original_forward", "_is_accelerate_prepared"} & vars(found.model).keys()


def test_steps_in_bfloat16_are_of_the_weights_as_they_are_then():
    """Autocast keeps rounded weights for as long as another one is around it: those of before the first step."""
    dense, options = cases.build(DENSE), {"steps": 6, "eval_steps": 3, "learning_rate": 0.02, "warmup_steps": 0}
    with plain_computation():
        found = trained(half_pruned()[0], dense, bf16=True, **options).held_out
    wanted = trained(half_pruned()[0], dense, bf16=False, **options).held_out
    assert found == pytest.approx(wanted, rel=0.05)
    assert abs(wanted[6] - wanted[0]) > 0.2 * wanted[0], "it is another model than it was"


def test_no_row_comes_twice_while_there_are_others():
    rows = [{"window": number} for number in range(22)]
    assert _whole_steps(rows, 4, steps=5) == rows[:20]
    assert _whole_steps(rows, 4, steps=6) == [*rows, *rows[:2]]


def test_rows_that_are_held_out_are_never_trained_on():
    rows = text()
    ids = [{tuple(row["input_ids"].tolist()) for row in part} for part in (rows.trained, rows.kept_back)]
    assert (len(ids[0]), len(ids[1])) == (12, 1), "at most a tenth"
    assert not ids[0] & ids[1]
    with pytest.raises(ValueError, match="1 different rows with a token that counts, and one is held out"):
        RecoveryText.of(Batches(({"input_ids": torch.ones(4, 3).long()},), "same", 4, 12, ""), 1)


def test_a_text_that_is_too_short_for_every_step_gives_what_it_has(text_file):
    options = {"part": "calibration", "model": cases.build(DENSE), "processing_class": cases.tokenizer()}
    some = load_batches(str(text_file), WindowSpec(4, 64, 1), **options)
    most = load_batches(str(text_file), WindowSpec(10**6, 64, 1, at_most=True), **options)
    assert most.samples == len(text_file.read_text()) // 64
    assert torch.equal(most.items[0]["input_ids"], some.items[0]["input_ids"])
    with pytest.raises(ValueError, match="holds"):
        load_batches(str(text_file), WindowSpec(10**6, 64, 1), **options)
    with pytest.raises(ValueError, match=r"holds 5 tokens.*; a window needs 64 tokens\. Give more"):
        load_batches(["short"], WindowSpec(10**6, 64, 1, at_most=True), **options)
    mixture = {str(text_file): 3, "pydoc": 1}
    mixed = load_batches(mixture, WindowSpec(8 * most.samples, 64, 1, at_most=True), **options)
    assert abs(mixed.samples - most.samples * 4 / 3) <= 2, "the weights hold"
    assert shares(mixture, mixed.samples)[str(text_file)] == most.samples
    assert f"{mixed.samples - most.samples} of " in mixed.protocol, "what it has been cut to"


def test_a_mixture_writes_no_more_than_it_takes(text_file, monkeypatch, caplog):
    """To write is what takes longest, and what the shortest text has no match for is cut off."""
    asked = []

    def own(model, samples, length, seed, **_):
        asked.append(samples)
        return torch.randint(256, (samples, length), generator=torch.Generator().manual_seed(seed))

    monkeypatch.setattr("gradprobe_hf.data.windows.own_text", own)
    options = {"part": "calibration", "model": cases.build(DENSE), "processing_class": cases.tokenizer()}
    held = len(text_file.read_text()) // 64
    mixture = {"self": 1, str(text_file): 1}
    mixed = load_batches(mixture, WindowSpec(8 * held, 64, 1, at_most=True), **options)
    assert asked == [held]
    assert mixed.samples == 2 * held
    assert (
        f"holds {held} of the {4 * held} rows that its weight asks for: all of the mixture is cut to 25%" in caplog.text
    )


def test_held_out_windows_are_none_to_train_on(text_file, caplog):
    reading = Reading(cases.build(DENSE), cases.tokenizer(), Processes(), progress=False)
    config = RecoveryConfig(steps=9, batch_size=4, num_samples=20, held_out_samples=2, sequence_length=16)
    with caplog.at_level("INFO", logger="gradprobe_hf"):
        found = read_text(str(text_file), config, reading)
    assert found.kept_back
    assert f"the text has {len(found.trained)} windows to train on, " in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "gpt_neox", "opt", "mixtral"])
def test_other_architectures(name):
    student, masks = half_pruned(name)
    found = trained(student, cases.build(name), steps=8, learning_rate=1e-3)
    assert found.held_out[found.best_step] < found.held_out[0]
    assert zeros(student, masks)[0] == 0


def _in_two(folder):
    processes = join_processes()
    student, masks = half_pruned()
    found = trained(
        student, cases.build(DENSE), processes=processes, folder=Path(folder), batch_size=4, steps=3, bf16=False
    )
    return weights(student), found.held_out, zeros(student, masks)


@pytest.mark.slow
def test_two_processes_take_the_steps_that_one_takes(tmp_path):
    alone, _ = half_pruned()
    found = trained(alone, cases.build(DENSE), batch_size=4, steps=3)
    for mine, held_out, left in together(_in_two, str(tmp_path / "two")):
        assert left == (0, 0)
        assert held_out == pytest.approx(found.held_out, rel=1e-4)
        for name, value in weights(alone).items():
            # Adam's steps are of a sign where a gradient is next to nothing, and rounding decides that.
            assert ((mine[name] - value).abs() > 1e-4).float().mean() < 0.01, name
