"""Block matching against a block of a copy that is trained by hand, and whole runs with it."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import disk_offload
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Zamba2Config, Zamba2ForCausalLM

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.estimation.expected_passes import expected_passes
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.targets import block_vectors, find_targets
from gradprobe_hf.reconstruction import reconstruct
from gradprobe_hf.reconstruction.block_matching import BlockExamples, Example, Matching, match_block
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.updates import refinement
from tests import cases

BLOCKS = {"refinement": "blocks", "score": "magnitude", "sparsity": 0.5}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Two sequences in a step and few of them: tiny models learn in no time."""
    changed = {"epochs": 3, "windows": 2, "rate": 0.02, "patience": 9}
    settings = refinement.Refinement(**{**vars(refinement.REFINEMENTS["blocks"]), **changed})
    monkeypatch.setitem(refinement.REFINEMENTS, "blocks", settings)
    return settings


@pytest.mark.parametrize("aims_at_dense", [False, True])
def test_a_batch_that_a_block_has_no_part_in_is_no_example(aims_at_dense):
    """A text without an image, to a tower that sees."""
    dense, batches = cases.build("llama"), cases.batches("llama", rows=4, batch_size=2)
    block = find_targets(dense)[0].block
    examples = BlockExamples(dense, block, 0.5)
    with torch.no_grad(), examples.recording():
        for batch, reaches in zip([*batches, batches[0]], (True, False, True), strict=True):
            take = partial(examples.take, batch)
            for after in (examples.take_dense, take) if aims_at_dense else (take,):
                if reaches:
                    dense(**batch, use_cache=False)
                after()
    first, none, again = examples.examples
    assert none is None
    assert torch.equal(first.target, again.target)


def calls_of(block, model, batches):
    """(args, kwargs, output) of a block in each batch, by a plain hook."""
    found = []

    def note(module, args, kwargs, output):
        found.append((args, kwargs, output if isinstance(output, torch.Tensor) else output[0]))

    handle = block.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        for batch in batches:
            model(**batch, use_cache=False)
    handle.remove()
    return found


def trained_by_hand(dense, batches, masks, settings):
    """Block by block on a copy whose own parameters are trained; the last step is held out."""
    pruned = copy.deepcopy(dense).requires_grad_(False)
    targets = find_targets(dense)
    names = list(dict.fromkeys(target.block for target in targets))
    for name in names:
        block, original = pruned.get_submodule(name), dense.get_submodule(name)
        calls = calls_of(block, pruned, batches)
        wanted = []
        for (args, kwargs, _), (_, _, far) in zip(calls, calls_of(original, dense, batches), strict=True):
            near = original(*args, **kwargs)
            near = near if isinstance(near, torch.Tensor) else near[0]
            wanted.append(((1 - settings.dense_target) * near + settings.dense_target * far).detach())
        keep = {}
        for target in targets:
            if target.block == name:
                target.matrix(pruned).masked_fill_(masks[target.name], 0)
                mask = masks[target.name].t() if target.transposed else masks[target.name]
                keep[target.parameter] = ~mask
        own = {key: value for key, value in block.named_parameters(prefix=name) if key in keep or value.ndim == 1}

        def error(number, block=block, calls=calls, wanted=wanted):
            out = block(*calls[number][0], **calls[number][1])
            out = out if isinstance(out, torch.Tensor) else out[0]
            y = wanted[number]
            return sum(
                ((out[s, t] - y[s, t]) ** 2).sum() / (y[s, t] ** 2).sum()
                for s in range(len(y))
                for t in range(y.shape[1])
            )

        size = 1 / torch.cat([1 / (y**2).sum(-1).flatten() for y in wanted]).mean()
        groups = []
        for key, value in own.items():
            value.requires_grad_()
            kept = value.detach()[keep[key]] if key in keep else value.detach()
            groups.append({"params": [value], "lr": settings.rate * (kept.square().mean().sqrt().item() or 1.0)})
        optimizer = torch.optim.Adam(groups, betas=settings.betas)
        rates = [group["lr"] for group in groups]
        last = len(batches) - 1
        steps = settings.epochs * last
        best, state, number = float(error(last).detach()), copy.deepcopy(block.state_dict()), 0
        generator = torch.Generator().manual_seed(0)
        for _ in range(settings.epochs):
            for index in torch.randperm(last, generator=generator).tolist():
                fraction = torch.tensor(torch.pi * (number - 1) / (steps - 1)).cos().item()
                scale = 1.0 if number == 0 else settings.last_rate + (1 - settings.last_rate) * (1 + fraction) / 2
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * scale
                optimizer.zero_grad()
                (size * error(index)).backward()
                for key, value in own.items():
                    if key in keep:
                        value.grad *= keep[key]
                optimizer.step()
                number += 1
            if (now := float(error(last).detach())) < best:
                best, state = now, copy.deepcopy(block.state_dict())
        block.load_state_dict(state)
        block.requires_grad_(False)
    return pruned


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_it_equals_a_block_that_is_trained_by_hand(name, short):
    model = cases.build(name).double().eval()
    batches = [{"input_ids": batch["input_ids"]} for batch in cases.batches(name, rows=8, batch_size=2)]
    masks = cases.prune(model, batches, score="magnitude", sparsity=0.5).masks
    found = cases.prune(model, batches, apply=True, output_dir=None, **BLOCKS)
    wanted = trained_by_hand(cases.build(name).double().eval(), batches, masks, short)
    moved = 0
    for (key, value), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        # The gradient of a key's bias is zero but for rounding, which Adam takes for a direction.
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
        moved += value.ndim == 1 and not torch.equal(value, cases.build(name).double().get_parameter(key))
    assert moved, "gains and biases are trained, too"
    assert not cases.differing(masks, found.masks)


@pytest.mark.parametrize("name", sorted(cases.CASES))
def test_every_family_is_matched_and_its_zeros_stay(name):
    model, batches = cases.build(name), cases.batches(name, rows=8)
    before = cases.bits(model)
    result = cases.prune(model, batches, **BLOCKS)
    assert cases.changed(model, before) == [], "nothing is applied"
    for target in result.targets:
        assert bool((result.new_weights[target.name][result.masks[target.name]] == 0).all()), target.name
    found = result.report.refinement
    assert set(found) == {target.block for target in result.targets}
    assert all(block["after"] <= block["before"] for block in found.values())
    assert any(block["after"] < block["before"] for block in found.values())


def test_what_is_evaluated_applied_saved_and_loaded_is_one_model(tmp_path):
    model = cases.build("gpt2")  # with biases
    before = cases.bits(model)
    calibration, evaluation = cases.batches("gpt2", rows=8), cases.batches("gpt2", seed=3)
    options = {"evaluation": evaluation, "output_dir": tmp_path / "out", **BLOCKS}
    result = cases.prune(model, calibration, apply=True, **options)
    assert any(name.endswith("bias") for name in cases.changed(model, before))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert cases.changed(loaded, model.state_dict()) == []
    again = measure(cases.workload(loaded, evaluation))
    assert again.loss == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-6)
    assert "trained as a whole" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_failure_behind_it_gives_every_gain_and_bias_back(tmp_path, monkeypatch):
    model = cases.build("gpt2")
    before = cases.bits(model)
    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.write_checkpoint", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cases.prune(model, cases.batches("gpt2", rows=8), apply=True, output_dir=tmp_path / "out", **BLOCKS)
    assert cases.changed(model, before) == []


def test_an_offloaded_model_ends_with_the_same_weights(tmp_path):
    resident, offloaded = cases.build("llama"), cases.build("llama")
    disk_offload(offloaded, tmp_path / "store")
    options = {"offload_folder": tmp_path / "scratch", "apply": True, **BLOCKS}
    for name, model in (("a", resident), ("b", offloaded)):
        cases.prune(model, cases.batches("llama", rows=8), output_dir=tmp_path / name, **options)
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert cases.changed(one, other.state_dict()) == []
    assert not torch.equal(one.model.norm.weight, one.model.layers[0].input_layernorm.weight)


def test_the_batch_size_has_no_part_in_it(text_file):
    found = []
    text = {"processing_class": cases.tokenizer(), "num_samples": 8, "sequence_length": 12}
    for size in (1, 2, 8):
        model = cases.build("llama")
        cases.prune(model, text_file, apply=True, batch_size=size, **text, **BLOCKS)
        found.append(model)
    for name, value in found[0].named_parameters():
        for other in found[1:]:
            torch.testing.assert_close(value, other.get_parameter(name), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 4])
def test_of_few_windows_some_are_held_out(rows, short, monkeypatch):
    """They would all be one step, which would train on what it is judged by: there are two or three of them."""
    settings = replace(short, windows=4)
    monkeypatch.setitem(refinement.REFINEMENTS, "blocks", settings)
    model = cases.build("llama").double().eval()
    batches = [{"input_ids": batch["input_ids"]} for batch in cases.batches("llama", rows=rows, batch_size=rows)]
    masks = cases.prune(model, batches, apply=True, **BLOCKS).masks
    parts = [{"input_ids": part} for part in batches[0]["input_ids"].split(rows // 2)]
    wanted = trained_by_hand(cases.build("llama").double().eval(), parts, masks, settings)
    for (key, value), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")


def ragged(rows, size):
    """Rows of unequal lengths, each batch padded to its longest."""
    batches = []
    for number in range(0, len(rows), size):
        some = rows[number : number + size]
        ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in some], batch_first=True)
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def test_rows_of_unequal_lengths_train_as_in_batches_of_four(short, monkeypatch):
    """A batch of more would be one step, and one that is held out."""
    monkeypatch.setitem(refinement.REFINEMENTS, "blocks", replace(short, windows=4))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (3 + number % 10,), generator=generator) for number in range(16)]
    found = []
    for size in (4, 8, 16):
        model = cases.build("llama").double().eval()
        matched = cases.prune(model, ragged(rows, size), apply=True, **BLOCKS).report.refinement
        assert any(one["kept"] for one in matched.values()), "something was trained"
        found.append(dict(model.named_parameters()))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-8, msg=name)


def test_a_block_without_experts_aims_at_what_it_did_with_all_of_them(monkeypatch):
    model = cases.build("mixtral").eval()
    batches = [{"input_ids": batch["input_ids"]} for batch in cases.batches("mixtral", rows=8, batch_size=2)]
    recorded = {}

    def note(_task, block, _inside, examples, made):
        recorded[block] = [example.target for example in examples.examples]
        return made

    monkeypatch.setattr(reconstruct, "_refined", note)
    first = next(iter(dict.fromkeys(target.block for target in find_targets(model))))
    dense = [output for _, _, output in calls_of(model.get_submodule(first), model, batches)]
    for update in ("none", "least_squares"):
        cases.prune(model, batches, structure={"experts": 1}, update=update, refinement="blocks", apply=False)
        torch.testing.assert_close(torch.cat(recorded[first]), torch.cat(dense), rtol=1e-5, atol=1e-6)


def test_padding_has_no_part_in_it():
    found = []
    for filler in (5, 9):
        model, batches = cases.build("llama"), cases.batches("llama", rows=8)
        for batch in batches:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][:, -4:] = 0
            batch["input_ids"][:, -4:] = filler
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        cases.prune(model, batches, apply=True, **BLOCKS)
        found.append(model)
    for name, value in found[0].named_parameters():
        torch.testing.assert_close(value, found[1].get_parameter(name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_tokens_that_nothing_comes_of_have_no_part_in_it(size):
    """The embedding of the padding token, which is what texts begin with, may be zeros: so is all that follows of it.

    A relative error of such a token would be all of the loss, and too large to be trained.
    """
    model, batches = cases.build("llama"), cases.batches("llama", rows=16)
    for batch in batches:
        batch["input_ids"][:, 0] = 1
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = size
    result = cases.prune(model, batches, **BLOCKS)
    assert all(block["after"] < block["before"] for block in result.report.refinement.values())


def test_it_needs_blocks_to_train():
    with pytest.raises(ValueError, match="refinement='none'"):
        cases.prune(cases.build("llama"), cases.batches("llama"), include=["lm_head"], **BLOCKS)


def test_the_option_is_checked():
    with pytest.raises(ValueError, match=r"refinement must be one of .*'blocks'.*got 'layers'"):
        GradProbeConfig(refinement="layers")


def test_no_more_passes_are_made_than_were_expected(short):
    """Every epoch counts, also one behind the best; fewer if training ends early."""
    report = cases.prune(cases.build("llama"), cases.batches("llama", rows=8), **BLOCKS).report
    expected = expected_passes(cases.config(**BLOCKS), blocks=3)
    assert expected.trained == short.epochs
    assert report.passes == pytest.approx({"forward": expected.forward, "backward": expected.backward})


def matching(tail=()):
    """Of the first block of a model whose smaller half of the weights is zero."""
    model = cases.build("gpt2")
    targets = [one for one in find_targets(model) if one.block == "transformer.h.0"]
    values, masks, examples = {}, {}, []
    for target in targets:
        matrix = target.matrix(model).detach().clone()
        masks[target.name] = matrix.abs() < matrix.abs().median()
        values[target.name] = matrix.masked_fill(masks[target.name], 0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        inputs = torch.randn(1, 8, model.config.n_embd, generator=generator)
        with torch.no_grad():
            output = model.transformer.h[0](inputs)
        output = output if isinstance(output, torch.Tensor) else output[0]
        examples.append(Example(((inputs,), {}), output, output.square().sum(-1).reciprocal()))
    settings = refinement.REFINEMENTS["blocks"]
    task = Matching(model, "transformer.h.0", targets, [*examples, *tail], settings, Processes(), 0)
    return match_block(task, values, masks)[2]


def test_what_a_block_has_no_part_in_is_not_held_out():
    """The last tenth of the rows, all of text, say, of a tower that sees: it would have been judged by nothing."""
    assert matching([None] * 4) == matching()
    assert matching().after < matching().before


def zamba():
    """Two blocks of the same weights and norms."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_hidden_size": 32, "attention_head_dim": 16}
    mamba = {"mamba_d_state": 4, "n_mamba_heads": 2, "mamba_headdim": 16, "mamba_expand": 2, "chunk_size": 8}
    kinds = {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1}
    torch.manual_seed(0)
    config = Zamba2Config(**sizes, **heads, **mamba, **kinds, adapter_rank=4, mamba_ngroups=1, pad_token_id=0)
    return Zamba2ForCausalLM(config).eval()


def test_vectors_that_blocks_share_and_those_of_routers_are_not_trained():
    model = zamba()
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False) if "shared_transformer" in name}
    assert shared
    for block in (1, 3):
        found = {one.name for one in block_vectors(model, f"model.layers.{block}")}
        assert found
        assert not found & shared
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "head_dim": 8}
    mixture = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **mixture))
    names = {one.name for one in block_vectors(model, "model.layers.0")}
    assert any(name.endswith("sinks") for name in names)
    assert not any("router" in name for name in names)


def test_of_blocks_with_the_same_norms_a_model_is_left_as_it_was():
    model, batches = zamba(), cases.batches("llama", rows=8)
    before = cases.bits(model)
    cases.prune(model, batches, evaluation=batches, **BLOCKS, exclude=["re:shared_transformer"], apply=False)
    assert cases.changed(model, before) == []
