"""The engine against the slow obvious way, in float64, and what it must never do to a model."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    FSMTConfig,
    FSMTForConditionalGeneration,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.engine import ProbePass, observe_inputs, run_probe
from gradprobe_hf.probe.maps.attachment import serving
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.scores.fisher import estimated_fisher
from tests import cases
from tests.grids import grid
from tests.reference import naive
from tests.structure_page import MASKED

TERMS = frozenset({"sequence", "token", "marginals", "peak"})
ORACLE_CASES = ["llama", "tied", "gpt2", "opt", "gpt_neox", "bert", "t5", "vit"]


def candidates(targets, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {target.name: torch.rand(target.shape, generator=generator) < 0.4 for target in targets}


def as_double(parts):
    return [{k: v.double() if v.is_floating_point() else v for k, v in part.items()} for part in parts]


def probed(model, targets, parts, loss_fn=None, **options):
    """The statistics of one probe, and its loss."""
    statistics = Statistics(targets, TERMS, model)
    return statistics, folded(statistics, model, targets, parts, loss_fn, **options)


def folded(statistics, model, targets, parts, loss_fn=None, **options):
    """The loss of one more probe, which is added to the statistics."""
    work = cases.workload(model, as_double(parts), loss_fn=loss_fn)
    return run_probe(work, ProbePass(targets, statistics, **options))


def fisher_of(statistics, estimate):
    return estimated_fisher(statistics, estimate, slice(None))


@pytest.mark.parametrize("name", ORACLE_CASES)
@pytest.mark.parametrize("shrunk", [False, True], ids=["original", "shrunk"])
def test_statistics_equal_a_loop_of_autograd(name, shrunk):
    model = cases.build(name, torch.float64)
    targets = find_targets(model)
    masks = candidates(targets) if shrunk else None
    statistics, loss = probed(model, targets, cases.batches(name), shrunk=masks, factor=0.1)
    wanted, total = naive.statistics(
        model, cases.batches(name, batch_size=1), [target.name for target in targets], masks, factor=0.1
    )
    assert loss.total == pytest.approx(total, rel=1e-9)
    for target in targets:
        found = statistics[target.name]
        for term, value in {
            "sequence": found.read("sequence"),
            "token": found.read("token"),
            "peak": found.read("peak"),
            "factored": found.factored(),
        }.items():
            torch.testing.assert_close(
                value, wanted[target.name][term], rtol=1e-7, atol=1e-18, msg=f"{target.name} {term}"
            )


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}),
        ("longformer", {"attention_window": 8}),
    ],
)
def test_what_a_map_returns_may_be_written_into(kind, own):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **MASKED, **own)).double().eval()
    row = {"input_ids": torch.randint(2, 250, (1, 16)), "labels": torch.randint(2, 250, (1, 16))}
    targets = find_targets(model)
    statistics, loss = probed(model, targets, [row])
    model.requires_grad_(True)
    wanted = naive.sequence_loss(model, row)
    assert loss.total == pytest.approx(float(wanted.detach()), rel=1e-9)
    for target in targets:
        (gradient,) = torch.autograd.grad(
            wanted, model.get_parameter(target.parameter), retain_graph=True, materialize_grads=True, allow_unused=True
        )
        found = 0 * gradient if target.name in statistics.unreached else statistics[target.name].read("sequence")
        torch.testing.assert_close(found, gradient**2, rtol=1e-7, atol=1e-18, msg=target.name)


@pytest.mark.parametrize("name", ["llama", "opt", "t5"])
def test_batch_size_changes_nothing(name):
    model = cases.build(name, torch.float64)
    targets = find_targets(model)
    one, loss_one = probed(model, targets, cases.batches(name, batch_size=1))
    for size in (2, 3, 6):
        other, loss_other = probed(model, targets, cases.batches(name, batch_size=size))
        assert loss_other.total == pytest.approx(loss_one.total, rel=1e-12)
        assert loss_other.terms == loss_one.terms
        for target in targets:
            for kind in ("sequence", "token", "factored", "blend"):
                torch.testing.assert_close(
                    fisher_of(other[target.name], kind), fisher_of(one[target.name], kind), rtol=1e-9, atol=1e-20
                )


def test_two_probes_add_up():
    model = cases.build("llama", torch.float64)
    targets = find_targets(model)
    masks = candidates(targets)
    statistics = Statistics(targets, TERMS, model)
    folded(statistics, model, targets, cases.batches("llama"))
    statistics.probe = 1
    folded(statistics, model, targets, cases.batches("llama"), shrunk=masks, factor=0.1)
    names = [target.name for target in targets]
    first, _ = naive.statistics(model, cases.batches("llama", batch_size=1), names)
    second, _ = naive.statistics(model, cases.batches("llama", batch_size=1), names, masks, 0.1)
    for name in names:
        for kind in ("sequence", "token", "factored"):
            wanted = first[name][kind] + second[name][kind]
            torch.testing.assert_close(fisher_of(statistics[name], kind), wanted, rtol=1e-7, atol=1e-18)
        # Wanda looks at the inputs of the original model only
        torch.testing.assert_close(statistics[name].input_sq()[0], first[name]["x_sq"], rtol=1e-9, atol=1e-18)


@grid("name, batch_size", ["llama", "gpt2", "opt", "bert"], [1, 3, 4])
def test_a_gradient_that_explodes_is_limited(name, batch_size):
    """Its energy at a matrix, in what it had there in the first probe; whatever the batches."""
    model = cases.build(name, torch.float64)
    targets, rows = find_targets(model), cases.batches(name, batch_size=batch_size)
    masks, names = candidates(targets), [target.name for target in targets]
    first, _ = naive.statistics(model, cases.batches(name, batch_size=1), names)
    free, _ = naive.statistics(model, cases.batches(name, batch_size=1), names, masks, 0.1)
    growth = torch.tensor([free[n]["energies"] for n in names]) / torch.tensor([first[n]["energies"] for n in names])
    limit = float(growth.median())  # so that half of them are limited
    second, _ = naive.statistics(model, cases.batches(name, batch_size=1), names, masks, 0.1, first, limit)
    statistics = Statistics(targets, TERMS, model)
    folded(statistics, model, targets, rows, spike_limit=limit)
    statistics.probe = 1
    folded(statistics, model, targets, rows, shrunk=masks, factor=0.1, spike_limit=limit)
    for target in targets:
        for kind in ("sequence", "token", "factored"):
            wanted = first[target.name][kind] + second[target.name][kind]
            torch.testing.assert_close(fisher_of(statistics[target.name], kind), wanted, rtol=1e-7, atol=1e-18)
    differs = [not torch.equal(free[n]["token"], second[n]["token"]) for n in names]
    assert any(differs), "some were limited"


def test_a_matrix_used_by_every_layer_is_limited_in_all_of_them_together():
    """Each use by itself: compared with the sum over all uses, three of them would have three times the limit."""
    torch.manual_seed(0)
    sizes = {"embedding_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    config = AlbertConfig(vocab_size=cases.VOCABULARY, num_hidden_layers=3, **sizes)
    model = AlbertForSequenceClassification(config).double().eval()
    targets, parts = find_targets(model), [{"input_ids": torch.arange(12)[None], "labels": torch.tensor([1])}]
    statistics = Statistics(targets, frozenset({"marginals"}), model)
    folded(statistics, model, targets, parts, spike_limit=0.01)
    statistics.probe = 1
    folded(statistics, model, targets, parts, shrunk=candidates(targets), factor=0.1, spike_limit=0.01)
    for target in targets:
        before, after = (statistics[target.name].marginals.of[probe, 0].rows.sum() for probe in (0, 1))
        torch.testing.assert_close(after, 0.01 * before)


def test_a_limit_of_zero_is_none():
    model = cases.build("llama", torch.float64)
    unlimited, huge, limited = (
        cases.prune(model, cases.batches("llama"), sparsity=0.7, spike_limit=limit).masks for limit in (0.0, 1e9, 0.1)
    )
    assert not cases.differing(unlimited, huge)
    assert cases.differing(unlimited, limited)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_counts_for_nothing(side):
    model = cases.build("llama", torch.float64)
    targets = find_targets(model)
    rows = [{"input_ids": torch.randint(256, (1, n), generator=torch.Generator().manual_seed(n))} for n in (7, 12, 9)]
    apart, loss_apart = probed(model, targets, rows)
    padded = torch.full((3, 12), 258)
    mask = torch.zeros(3, 12, dtype=torch.long)
    for index, row in enumerate(rows):
        length = row["input_ids"].shape[1]
        place = slice(0, length) if side == "right" else slice(12 - length, 12)
        padded[index, place], mask[index, place] = row["input_ids"][0], 1
    together, loss_together = probed(model, targets, [{"input_ids": padded, "attention_mask": mask}])
    assert loss_together.total == pytest.approx(loss_apart.total, rel=1e-9)
    assert loss_together.terms == loss_apart.terms
    # the rotations of later positions are other float32 numbers
    close = {"rtol": 1e-7 if side == "right" else 1e-4, "atol": 1e-18}
    for target in targets:
        for kind in ("sequence", "token", "factored"):
            torch.testing.assert_close(
                fisher_of(together[target.name], kind), fisher_of(apart[target.name], kind), **close
            )
        torch.testing.assert_close(together[target.name].input_sq(), apart[target.name].input_sq(), **close)


def test_padding_of_either_side_of_an_encoder_decoder_counts_for_nothing():
    """Sources and targets of one padded length, so that only the place in the model says which mask is whose."""
    model = cases.build("t5", torch.float64)
    targets = find_targets(model)
    draw = torch.Generator().manual_seed(5)
    rows = [
        {
            "input_ids": torch.randint(250, (1, source), generator=draw),
            "labels": torch.randint(250, (1, wanted), generator=draw),
        }
        for source, wanted in ((4, 9), (9, 5), (7, 7))
    ]
    apart, loss_apart = probed(model, targets, rows)
    together = {
        "input_ids": torch.full((3, 9), 258),
        "attention_mask": torch.zeros(3, 9, dtype=torch.long),
        "labels": torch.full((3, 9), -100),
    }
    for index, row in enumerate(rows):
        source, wanted = row["input_ids"].shape[1], row["labels"].shape[1]
        together["input_ids"][index, :source] = row["input_ids"][0]
        together["attention_mask"][index, :source] = 1
        together["labels"][index, :wanted] = row["labels"][0]
    found, loss = probed(model, targets, [together])
    assert loss.total == pytest.approx(loss_apart.total, rel=1e-9)
    for target in targets:
        for kind in ("sequence", "token", "factored"):
            torch.testing.assert_close(
                fisher_of(found[target.name], kind), fisher_of(apart[target.name], kind), rtol=1e-7, atol=1e-18
            )


def test_routed_experts_never_see_padding():
    model = cases.build("mixtral", torch.float64)
    targets = find_targets(model)
    rows = [{"input_ids": torch.randint(256, (1, n), generator=torch.Generator().manual_seed(n))} for n in (5, 9)]
    apart, _ = probed(model, targets, rows)
    padded, mask = torch.full((2, 9), 258), torch.zeros(2, 9, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : row["input_ids"].shape[1]] = row["input_ids"][0]
        mask[index, : row["input_ids"].shape[1]] = 1
    together, _ = probed(model, targets, [{"input_ids": padded, "attention_mask": mask}])
    for target in targets:
        assert together[target.name].reached == apart[target.name].reached
        if apart[target.name].reached:
            torch.testing.assert_close(together[target.name].factored(), apart[target.name].factored())


def test_a_matrix_used_twice_is_squared_after_its_uses_are_summed():
    """The head and the embedding of a tied model are one matrix: autograd sums both uses, and so must we."""
    model = cases.build("tied", torch.float64)
    targets = find_targets(model, include=["lm_head"])
    assert [target.name for target in targets] == ["model.embed_tokens.weight"]
    rows = cases.batches("tied", batch_size=1)
    statistics, _ = probed(model, targets, cases.batches("tied", batch_size=3))
    wanted = peak = 0
    for row in rows:
        model.zero_grad()
        naive.sequence_loss(model, row).backward()
        gradient = model.model.embed_tokens.weight.grad
        wanted = wanted + gradient**2
        peak = torch.maximum(torch.as_tensor(peak, dtype=torch.float64), gradient.abs())
    torch.testing.assert_close(statistics[targets[0].name].read("sequence"), wanted, rtol=1e-8, atol=1e-18)
    torch.testing.assert_close(statistics[targets[0].name].read("peak"), peak, rtol=1e-8, atol=1e-18)


def test_an_embedding_can_be_a_target():
    model = cases.build("llama", torch.float64)
    targets = find_targets(model, include=["embed_tokens"])
    statistics, _ = probed(model, targets, cases.batches("llama"))
    wanted = 0
    for row in cases.batches("llama", batch_size=1):
        model.zero_grad()
        naive.sequence_loss(model, row).backward()
        wanted = wanted + model.model.embed_tokens.weight.grad**2
    found = statistics[targets[0].name]
    torch.testing.assert_close(found.read("sequence"), wanted, rtol=1e-8, atol=1e-18)
    counts = torch.cat([row["input_ids"].flatten() for row in cases.batches("llama")]).bincount(
        minlength=cases.VOCABULARY
    )
    torch.testing.assert_close(found.input_sq()[:, 0], counts.double())


def test_inputs_alone_equal_the_probe_s_inputs():
    for name in ("llama", "gpt2", "t5"):
        model = cases.build(name, torch.float64)
        targets = find_targets(model)
        statistics = Statistics(targets, frozenset({"marginals"}), model)
        observe_inputs(cases.workload(model, cases.batches(name)), targets, statistics)
        full, _ = probed(model, targets, cases.batches(name))
        for target in targets:
            torch.testing.assert_close(statistics[target.name].input_sq(), full[target.name].input_sq())


@pytest.mark.parametrize("name", ["llama", "gpt2", "tied", "vit"])
def test_the_model_is_left_as_it_was(name):
    model = cases.build(name).train()
    model.get_parameter(next(iter(dict(model.named_parameters())))).requires_grad_(False)
    required = {n: p.requires_grad for n, p in model.named_parameters()}
    targets = find_targets(model)
    before = cases.bits(model)
    probed(model, targets, cases.batches(name), shrunk=candidates(targets), factor=0.1)
    with serving(model, targets, candidates(targets)):
        pass
    assert cases.changed(model, before) == []
    assert model.training
    assert all(module.training for module in model.modules())
    assert {n: p.requires_grad for n, p in model.named_parameters()} == required
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_weights_never_require_a_gradient_in_a_probe():
    model = cases.build("llama")
    seen = []

    def spy(model, batch):
        seen.append(any(p.requires_grad for p in model.parameters()) or model.training)
        return summed_loss(model, batch)[0]

    probed(model, find_targets(model), cases.batches("llama"), loss_fn=spy)
    assert seen == [False] * 3


def test_everything_is_put_back_after_an_exception():
    model = cases.build("llama").train()
    before = cases.bits(model)
    calls = []

    def fails_in_the_second_batch(model, batch):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return summed_loss(model, batch)[0]

    targets = find_targets(model)
    with pytest.raises(KeyboardInterrupt):
        probed(model, targets, cases.batches("llama"), loss_fn=fails_in_the_second_batch, shrunk=candidates(targets))
    assert cases.changed(model, before) == []
    assert model.training
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_served_model_is_the_pruned_model():
    for name in ("llama", "gpt2", "t5"):
        model = cases.build(name)
        targets = find_targets(model)
        masks = candidates(targets)
        row = cases.batches(name)[0]
        really = naive.shrunk_copy(model, masks, 0.0).float()
        with serving(model, targets, masks):
            served = model(**row).logits
        torch.testing.assert_close(served, really(**row).logits)


def test_nothing_of_a_matrix_s_size_outlives_it():
    """Gradients live one at a time: the factored Fisher of a big matrix must not hold [out, in] anywhere."""
    model = cases.build("llama")
    targets = find_targets(model)
    statistics = Statistics(targets, frozenset({"marginals"}), model)
    folded(statistics, model, targets, cases.batches("llama"))
    assert statistics.nbytes == 0
    sizes = {target.name: target.numel for target in targets}
    for name, numel in sizes.items():
        kept = statistics[name]
        held = [t for m in kept.marginals.of.values() for t in (m.rows, m.columns) if isinstance(t, torch.Tensor)]
        assert sum(t.numel() for t in held) < numel / 4


def test_a_bad_loss_is_refused_with_a_remedy():
    model = cases.build("llama")
    targets = find_targets(model)
    with pytest.raises(ValueError, match="loss is nan"):
        probed(model, targets, cases.batches("llama"), loss_fn=lambda m, b: m(**b).logits.sum() * float("nan"))
    with pytest.raises(ValueError, match="must be a scalar"):
        probed(model, targets, cases.batches("llama"), loss_fn=lambda m, b: m(**b).logits)
    vit = cases.build("vit")
    with pytest.raises(ValueError, match="returns no loss"):
        probed(vit, find_targets(vit), [{"pixel_values": torch.randn(2, 3, 8, 8)}])


@pytest.mark.parametrize(
    "options", [{}, {"order": "sequential", "blocks_per_step": 1}, {"structure": {"ffn": 4}, "importance": "fisher"}]
)
def test_a_loss_that_is_flat_is_refused(options):
    """All scores would be 0, and the first matrices would go whole."""

    def flat(model, batch):
        return model(**batch).logits.sum() * 0.0

    model = cases.build("llama")
    before = cases.bits(model)
    with pytest.raises(ValueError, match=r"every gradient of the loss \(0\) is 0"):
        cases.prune(model, cases.batches("llama"), loss_fn=flat, **options)
    assert not cases.changed(model, before)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"fisher": "sequence", "accumulator_dtype": "int8"}),
        ("llama", {"rule": "threshold", "score": "magnitude"}),
        ("llama", {"structure": {"ffn": 4}, "importance": "fisher"}),
        ("mixtral", {"structure": {"experts": 1}}),
    ],
)
def test_gradients_that_are_no_numbers_are_refused(name, options):
    """As of a float16 model that overflows on the way back alone: its loss is finite."""

    def overflowing(model, batch):
        logits = model(**batch).logits
        return logits.sum() + (0 * logits).sum().sqrt()  # the slope of the root at 0 is infinite

    model = cases.build(name)
    before = cases.bits(model)
    with pytest.raises(ValueError, match=r"float16.*bfloat16"):
        cases.prune(model, cases.batches(name), loss_fn=overflowing, **options)
    assert not cases.changed(model, before)


def numbered(mask):
    """A mask of segments, as packed texts have them: transformers takes what is not 0."""
    return mask * (1 + 2 * (torch.arange(mask.shape[1]) % 3 == 0))


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("options", [{"score": "wanda"}, {"fisher": "factored"}, {"update": "least_squares"}])
def test_a_mask_counts_what_is_not_zero(name, options):
    parts = cases.batches(name)
    for part in parts:
        part["attention_mask"] = torch.ones_like(part["input_ids"])
        part["attention_mask"][0, :4] = 0
    others = [{**part, "attention_mask": numbered(part["attention_mask"])} for part in parts]
    one, other = (cases.prune(cases.build(name), given, sparsity=0.5, **options) for given in (parts, others))
    assert cases.differing(one.masks, other.masks) == 0
    assert one.report.calibration["tokens"] == other.report.calibration["tokens"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_loss_is_not_rounded_to_half_precision(dtype):
    """transformers' own is a mean in the dtype of the logits."""
    model, terms = cases.build("t5", dtype), 0
    for batch in cases.batches("t5"):
        found, count = summed_loss(model, batch)
        logits = model(**batch).logits.double().flatten(0, 1)
        wanted = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
        terms += int(count)
    assert terms == sum(batch["labels"].numel() for batch in cases.batches("t5"))


def test_classes_that_are_not_counted_weigh_nothing():
    config = BertConfig(
        vocab_size=260, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_labels=3
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).double().eval()
    ids, labels = torch.arange(8 * 10).view(8, 10), torch.tensor([0, -100, -100, -100, 2, 1, 0, 1])
    found = [
        cases.prune(
            model,
            [{"input_ids": ids[part], "labels": labels[part]} for part in torch.arange(8).split(size)],
            sparsity=0.5,
            fisher="sequence",
        )
        for size in (8, 4)
    ]
    assert cases.differing(found[0].masks, found[1].masks) == 0
    losses = [one.report.probes["probe 0"] for one in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    logits = model(input_ids=ids).logits
    assert losses[0] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-9)


def test_sequences_that_cannot_be_told_apart_are_refused():
    model = cases.build("gpt2")
    targets = find_targets(model, include=["wpe"])  # positions are looked up once for the whole batch
    with pytest.raises(ValueError, match="batch_size=1"):
        probed(model, targets, cases.batches("gpt2", batch_size=2))
    statistics, _ = probed(model, targets, cases.batches("gpt2", batch_size=1))
    assert statistics[targets[0].name].reached


def expert_gradients(model, rows):
    """S and G of the fused expert tensors by plain autograd, one sequence at a time, `[experts, out, in]`."""
    parameters = {n: p for n, p in model.named_parameters() if "experts" in n}
    squares, peaks = dict.fromkeys(parameters, 0), {n: torch.zeros_like(p) for n, p in parameters.items()}
    for row in rows:
        model.zero_grad()
        naive.sequence_loss(model, row).backward()
        for name, parameter in parameters.items():
            squares[name] = squares[name] + parameter.grad**2
            peaks[name] = torch.maximum(peaks[name], parameter.grad.abs())
    return squares, peaks


@pytest.mark.parametrize("shrunk", [False, True], ids=["original", "shrunk"])
def test_experts_equal_autograd(shrunk):
    model = cases.build("mixtral", torch.float64)
    targets = find_targets(model, include=["re:experts"])
    masks = candidates(targets) if shrunk else None
    statistics, loss = probed(model, targets, cases.batches("mixtral"), shrunk=masks, factor=0.1)
    with torch.no_grad():
        for target in targets if shrunk else ():
            target.matrix(model)[masks[target.name]] *= 0.1
    model.set_experts_implementation("eager")  # grouped matrix products take no float64
    squares, peaks = expert_gradients(model, cases.batches("mixtral", batch_size=1))
    assert loss.total == pytest.approx(
        sum(float(naive.sequence_loss(model, row).detach()) for row in cases.batches("mixtral", batch_size=1)), rel=1e-9
    )
    for target in targets:
        found = statistics[target.name]
        for term, wanted in (("sequence", squares), ("peak", peaks)):
            own = wanted[target.parameter][target.expert]
            torch.testing.assert_close(found.read(term), own, rtol=1e-7, atol=1e-18)


def test_one_token_has_one_gradient():
    """With two tokens only the first is asked for a prediction: in the last block, S of an expert is its T."""
    model = cases.build("mixtral", torch.float64)
    model.set_experts_implementation("eager")  # the first block is not measured, and grouped products take no float64
    targets = find_targets(model, include=["re:layers.1.*experts"])
    statistics, _ = probed(model, targets, cases.batches("mixtral", rows=8, length=2))
    assert any(statistics[target.name].read("token").any() for target in targets)
    for target in targets:
        found = statistics[target.name]
        torch.testing.assert_close(found.read("sequence"), found.read("token"))


def xlnet():
    config = XLNetConfig(vocab_size=260, d_model=16, n_layer=2, n_head=4, d_inner=64, num_labels=2)
    return XLNetForSequenceClassification(config).eval()


def fsmt():
    sizes = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in SIZES.items()}
    config = FSMTConfig(langs=["en", "de"], src_vocab_size=260, tgt_vocab_size=260, d_model=16, **sizes)
    return FSMTForConditionalGeneration(config).eval()


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 24}


def deberta():
    places = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "share_att_key": True}
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("deberta-v2", **MASKED, **places)).eval()


def test_a_loss_that_compares_rows_is_told_that_they_go_alone():
    """CLIP's, say: beside a second term nothing else would show it."""
    torch.manual_seed(0)
    model, rows = deberta(), {"input_ids": torch.randint(3, 250, (4, 8))}

    def apart(model, batch):
        found = model(**batch).logits
        return (found - found.mean(0)).square().sum()

    def both(model, batch):
        return apart(model, batch) + model(**batch).logits.sum()

    with pytest.raises(ValueError, match=r"has nothing to compare here, since those of a DebertaV2.* go one at a time"):
        cases.prune(model, [rows], sparsity=0.5, loss_fn=apart)
    found = cases.prune(model, [rows], sparsity=0.5, loss_fn=both)
    assert any("loss_fn is called with one row at a time" in warning for warning in found.report.warnings)


@pytest.mark.parametrize("build", [xlnet, fsmt, deberta])
def test_models_in_which_rows_cannot_be_told_apart_take_one_at_a_time(build):
    """Of eight rows with eight tokens no shape tells which is which, and a map of places is for all of them."""
    torch.manual_seed(0)
    model, ids = build(), torch.randint(3, 250, (8, 8))
    batch = {"input_ids": ids, "labels": ids.flip(1) if build is fsmt else torch.arange(8) % 2}
    if build is fsmt:
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"].clone())
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(8)]
    alone, together = (cases.prune(model, given, sparsity=0.5) for given in (rows, [batch]))
    assert alone.report.sparsity == pytest.approx(0.5, abs=1e-3)
    assert all(torch.equal(mask, together.masks[name]) for name, mask in alone.masks.items())


def test_a_block_that_begins_at_zero_is_pruned_in_its_turn():
    """No gradient reaches its inner matrices, whose weights cost nothing."""
    model = cases.build("llama")
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_submodule(f"model.layers.1.{name}").weight.zero_()
    result = cases.prune(model, cases.batches("llama"), sparsity=0.5, order="sequential", blocks_per_step=1)
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)
    emptied = [row.name for row in result.report.matrices if row.zeros_before < row.zeros_after == row.weights]
    assert emptied == ["model.layers.1.self_attn.q_proj.weight"], "the first of those that cost nothing"
    assert f"1 of 21 matrices have no weight left (`{emptied[0]}`)" in " ".join(result.report.warnings)
    bounded = cases.prune(model, cases.batches("llama"), sparsity=0.5, max_matrix_sparsity=0.9)
    assert not any("no weight left" in warning for warning in bounded.report.warnings)


def test_a_mask_of_pairs_of_tokens_is_none_of_padding():
    """As packed texts have it, `[rows, 1, tokens, tokens]`: a causal one changes nothing."""
    parts = cases.batches("llama", length=40)
    rows, length = parts[0]["input_ids"].shape
    mask = torch.ones(length, length).tril().bool().expand(rows, 1, length, length)
    paired = [{**part, "attention_mask": mask} for part in parts]
    one, other = (cases.prune(cases.build("llama"), given, sparsity=0.5) for given in (parts, paired))
    assert cases.differing(one.masks, other.masks) == 0
    assert one.report.calibration["tokens"] == other.report.calibration["tokens"]
    assert one.report.calibration["sketch"] == other.report.calibration["sketch"]
