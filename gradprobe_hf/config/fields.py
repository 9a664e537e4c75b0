"""Fields: the options of a pruning run, what each is for, and what it is where nothing is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from gradprobe_hf.config.options import Options
from gradprobe_hf.config.presets import Preset
from gradprobe_hf.config.values import (
    AccumulatorDevice,
    AccumulatorDtype,
    BlockOrder,
    EvaluationProtocol,
    GradientThreshold,
    Order,
)
from gradprobe_hf.runtime.names_elsewhere import PRUNING, NamesElsewhere
from gradprobe_hf.scores.budget import Scope


@dataclass(frozen=True, kw_only=True)
class PruningOptions(Options):
    """How to prune.

    Args:
        sparsity: fraction of the target weights to remove, in [0, 1). Default: 0.5, or what `pattern` implies.
        pattern: `"unstructured"`, or n:m, such as `"2:4"`, to keep at most n of every m consecutive inputs of a row.
            NVIDIA counts so, too.
        structure: whole parts to remove in place of single weights, so that the checkpoint is smaller wherever it is
            loaded: `{"ffn": 0.3, "kv_groups": 1, "blocks": 4}`. `"ffn"`: the share of the channels of every
            feed-forward network, of which a multiple of 64 is kept, or exactly how many go. `"kv_groups"`: how many
            key-value heads of every block go, each with the query heads that read it. `"experts"`: the share of the
            experts of every mixture, or how many go, with their rows of the router. `"blocks"`: how many blocks go.
            `"auto"`: the best of the shapes that meet a budget, `params`, `memory` or `latency`, as measured.
        params: with `structure="auto"`: the most parameters that are left, as a share of the model's (`0.75`) or a
            number (`"100M"`). Embeddings count.
        memory: with `structure="auto"`: the most bytes that the weights are left with as they are written, `"200MB"`.
        latency: with `structure="auto"`: the most time that a text takes, as a share of the dense model's (`0.7`), by a
            table that is measured on this machine: 512 tokens are read, and 32 written by what writes, one text (or
            image, ...) at a time.
        preset: speed or quality: `"fast"` (`probes=1`), `"balanced"` (`probes=2`) or `"best"` (`probes=1,
            update="admm"`); with an n:m pattern these are `update="sparsegpt"`, `update="sparsegpt+admm"`, and
            `probes=1, update="admm"`. Options that are given win over a preset, which then is the name of what they
            make of it, if that has one. Default: `"best"`, where none of `score`, `probes`, `rule` and `update` is
            given, else no preset; `"balanced"` with `order="sequential"`, `reduction_factor` or `spike_limit`, which
            are about two probes.
        score: criterion that ranks the weights. One of `"fisher"`, `"wanda"`, `"magnitude"` and `"random"`. Default:
            `"fisher"`.
        probes: how often the loss gradient is measured over the calibration data. 1: the score decides. 2: the
            gradient is measured again with the weights that the score would remove shrunk. 0: the score decides,
            without any gradient. Default: the preset's; without one 2 with `score="fisher"`, else 0.
        rule: how two probes decide: by an exact `"budget"`, or by the `"threshold"` of the original GradProbe. With the
            former every weight is scored by both probes; with the latter the budget is an upper bound. Default:
            `"budget"`.
        scope: what one budget is spent over. One of `"global"`, `"block"`, `"tensor"` and `"row"`. Default:
            `"global"` with `score="fisher"` or two probes, else the scope the score was published with. That is row
            for Wanda, tensor for magnitude and random.
        fisher: estimate of the squared gradient. `"sequence"`, `"token"`, `"factored"`, or `"blend"`, the geometric
            mean of sequence and factored.
        importance: which channels and heads go with `structure`. `"obs"`: those that the others can make up for best.
            `"fisher"`: those whose gate has the least Fisher information. `"obs+fisher"`: both, an error that
            the others leave weighted by how much the loss depends on it; it fails where a block has massive
            activations. `"wanda"`, `"taylor"` and `"random"` are baselines. Default: `"fisher"` for channels, `"obs"`
            for heads.
        structure_rounds: in how many portions experts go, and channels and heads by `importance="fisher"` or
            `"taylor"`; before each the gates are measured anew, in the model without those that went before. Others go
            before the first, all at once. There are no more portions than units that go.
        update: how the kept weights change to preserve each matrix's outputs on the calibration inputs. `"none"`: not
            at all. `"obs"`: by SparseGPT's sweep under the mask that was decided. `"least_squares"`: to the best
            weights under it. `"admm"`: to these, after revising the mask within each matrix (row, group).
            `"sparsegpt"` chooses the mask itself, without score or probe; `"sparsegpt+least_squares"` and
            `"sparsegpt+admm"` go on from there. Default: the preset's, else `"none"`; with `structure`
            `"least_squares"`.
        dense_target: which outputs an update preserves, from 0 (as pruned so far) to 1 (of the dense model). As
            pruned so far: those of the original matrix on the inputs that the pruned blocks before it give. Default:
            0.25; 0 with `update="sparsegpt"`, as published.
        damping: what is added to the diagonal of a Hessian before it is inverted, as a fraction of its mean, > 0.
            `"auto"`, with `update="least_squares"`: for each matrix that of 0.01 to 1 with which its outputs on an
            eighth of the calibration rows, held out from the others, are kept best. Default: 0.01; `"auto"` with
            `structure` and `update="least_squares"`.
        refinement: what is trained of a block after the update of its matrices, under a mask that is fixed. `"none"`:
            nothing. `"blocks"`: its kept weights, the gains of its norms, its biases and other vectors, until its
            outputs are those of the dense block.
        recovery_steps: steps in which all kept weights are trained towards the dense model's predictions, after
            pruning, on more of the calibration's text. 0: none.
        recovery_learning_rate: highest learning rate of these steps, > 0.
        min_matrix_sparsity: least fraction to remove from any matrix, where one budget covers several.
        max_matrix_sparsity: largest fraction to remove from any matrix, so that none is emptied.
        gradient_threshold: relative growth of a gradient that `rule="threshold"` tolerates, >= 0. A dict has one for
            each pattern of matrices, `{"*.mlp.*": 0.5, "*": 0.1}`, of which the first that matches counts.
            `"adaptive"` goes by size: `sqrt(weights / mean weights of a matrix)`.
        reduction_factor: factor that candidates are shrunk by for the second probe, in [0, 1).
        spike_limit: largest growth of one sequence's gradient energy at a matrix between the probes, >= 0 (0: no
            limit). What grows more is scaled down to it.
        order: decide about all blocks at once (`"joint"`), or step by step (`"sequential"`). Joint takes two probes
            whatever the depth. In a sequential order each step of blocks is probed on the model as pruned so far, and
            has its share of the budget.
        block_order: where a sequential order begins: at the first block (`"forward"`), the last (`"reverse"`), or the
            largest (`"size"`).
        blocks_per_step: blocks that one step of a sequential order decides about.
        rounds: rising sparsities, each probed on the model as the one before would prune it. The last is `sparsity`;
            every round decides anew about every weight.
        max_metric_drop: prune as much as possible, up to `sparsity`, without perplexity rising, or the task's `metric`
            getting worse, by more than this, absolute (`1.5`) or relative (`"5%"`). One half of the evaluation chooses,
            the other is reported. `prune_pretrained` takes another metric as its `metric_fn`.
        initial_sparsity: sparsity of the first attempt with `max_metric_drop`. Default: `sparsity_step`.
        sparsity_step: distance between two attempts with `max_metric_drop`, before bisection.
        include: patterns of modules to prune: exact names, ends of names (`"q_proj"`), globs, or `"re:..."`. When
            given, only what they match is pruned, embeddings and output head included if matched.
        exclude: patterns of modules to leave dense.
        task: what the model is for, as the Hub calls it, such as `"text-generation"` or `"text-classification"`. It
            decides how a checkpoint is loaded, how rows of a data set become batches, and which metric is measured.
            Default: what the checkpoint's class is for.
        label_column: column of the data set with the labels, or with the texts that are to be written. Default: one of
            a usual name, such as `label`.
        metric: what is measured beside the loss: `"accuracy"`, `"f1"` (the mean of all classes), `"cosine"` (of
            embeddings with the dense model's), `"wer"` or `"bleu"`. It is what `max_metric_drop` limits. Default: what
            is usual for the task, `"accuracy"` for a classifier; perplexity for a language model; none for masked,
            translated or summarised text.
        num_samples: calibration windows, or rows of a labelled or tokenised dataset.
        sequence_length: tokens in a window. Default: 512, or as many as the model reads of a text.
        text_column: column of the data set with the text, or with the messages of a chat. Default: `messages`,
            `conversations`, `prompt` and `completion`, `text`, or the only column of chats or else of texts,
            without those that say which text it is (`id`, `url`, `source`).
        text_template: several columns as one text, `"{instruction}\\n{output}"` say.
        assistant_only_loss: count only what the assistant says in a chat, and what ends its turn. Without it all tokens
            count, the user's too. Of text that is no chat all count: calibrate on chats, and evaluate on either.
        packing: cut windows from all documents joined. Otherwise each window is one document, cut off at
            `sequence_length`, or padded and masked.
        document_separator: what is between documents that are packed: a text, or `"eos"` for the tokenizer's EOS token.
            Default: a blank line between texts, nothing between chats.
        add_special_tokens: begin each window of text as the tokenizer begins a text, with a BOS say, which counts as
            one of the window's tokens. BERT-like models: end it so, too.
        evaluation_samples: windows to measure perplexity on, or rows. Default: 20 windows; of labelled rows 1,000, or
            as many as there are, and where no data set to measure on is named, as many as calibrate.
        evaluation_protocol: how an evaluation text is cut: into `"windows"` that are drawn from it, or as in a
            `"paper"` (GPTQ, SparseGPT, Wanda), whole, in consecutive windows of the model's context, at most 2,048
            tokens. The latter's default text is WikiText-2's raw test split.
        measure_speed: time what is left with `structure`, and its memory, beside the dense model, for report and card:
            models of these shapes with random weights read and write a text in turns, as in `gradprobe bench`. With
            `"auto"` all shapes that were tried. It takes minutes.
        seed: seed of calibration windows, random scores and generated text.
        batch_size: windows in one forward pass: memory and speed, and of the result what rounding decides (more where a
            weight update has fewer tokens than a matrix has inputs). `"auto"`: the largest that fits.
        checkpointing: recompute each block in the backward pass instead of storing its activations. `"auto"`: where
            they would not fit in memory.
        accumulator_dtype: type that statistics are stored in: 4, 2 or about 1 byte per weight and term. `"int8"` is
            block-scaled and logarithmic (1.03 bytes); it and `"bfloat16"` are rounded stochastically.
        accumulator_device: where statistics are stored: with the weights (`"same"`), in host memory (`"cpu"`), or in
            files (`"disk"`). `"auto"`: the first of them that has room beside a pass.
        save_every: batches between two snapshots of a run with `resume_dir`.
    """

    elsewhere: ClassVar[NamesElsewhere] = PRUNING
    # The target.
    sparsity: float | None = None
    pattern: str = "unstructured"
    structure: Mapping[str, int | float] | Literal["auto"] | None = None
    params: int | float | str | None = None
    memory: int | str | None = None
    latency: float | None = None
    preset: Preset | None = None
    # The method.
    score: str | None = None
    probes: int | None = None
    rule: str | None = None
    scope: Scope | None = None
    fisher: str = "blend"
    importance: str | None = None
    structure_rounds: int = 1
    update: str | None = None
    dense_target: float | None = None
    damping: float | Literal["auto"] = 0.01
    refinement: str = "none"
    recovery_steps: int = 0
    recovery_learning_rate: float = 2e-4
    min_matrix_sparsity: float | None = None
    max_matrix_sparsity: float | None = None
    gradient_threshold: GradientThreshold = 0.0
    reduction_factor: float = 0.1
    spike_limit: float = 2.0
    # In which steps.
    order: Order = "joint"
    block_order: BlockOrder = "forward"
    blocks_per_step: int = 1
    rounds: Sequence[float] = ()
    max_metric_drop: float | str | None = None
    initial_sparsity: float | None = None
    sparsity_step: float = 0.1
    # Which matrices, and on what text.
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    task: str | None = None
    label_column: str | None = None
    metric: str | None = None
    num_samples: int = 128
    sequence_length: int | None = None
    text_column: str | None = None
    text_template: str | None = None
    assistant_only_loss: bool = False
    packing: bool = True
    document_separator: str | None = None
    add_special_tokens: bool = True
    evaluation_samples: int | None = None
    evaluation_protocol: EvaluationProtocol = "windows"
    measure_speed: bool = False
    seed: int = 0
    # With which memory; no result depends on these but by rounding.
    batch_size: int | Literal["auto"] = 4
    checkpointing: bool | Literal["auto"] = "auto"
    accumulator_dtype: AccumulatorDtype = "float32"
    accumulator_device: AccumulatorDevice | Literal["auto"] = "auto"
    save_every: int = 16

    def __new__(cls, *values: Any, **options: Any) -> Self:
        made = super().__new__(cls, *values, **options)
        object.__setattr__(made, "_given", named(options))
        return made

    @property
    def given(self) -> frozenset[str]:
        """The options that were passed; the others are what these, or the defaults, come to."""
        found: frozenset[str] = self.__dict__["_given"]  # no field: it is no part of what the configuration is
        return found


def named(options: Mapping[str, Any]) -> frozenset[str]:
    """Those of which something is said: None stands for nothing."""
    return frozenset(name for name, value in options.items() if value is not None)
