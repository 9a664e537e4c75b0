"""RecoveryConfig: everything that decides the result of a recovery, validated when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.options import Options
from gradprobe_hf.config.together import check_task
from gradprobe_hf.config.values import CHOICES, LARGEST_SEED
from gradprobe_hf.data.text.text_options import TEXT_OPTIONS, TextOptions
from gradprobe_hf.runtime.names_elsewhere import RECOVERY, NamesElsewhere
from gradprobe_hf.runtime.option_checks import number, one_of, whole

EVALUATIONS = 10  # of the held-out text in a run, where no distance was asked for
WARM_UP = 15  # one step in so many, where no number was asked for
# What a pruning run says of the data that its recovery reads, too.
OF_THE_DATA = ("task", "label_column", "metric", "sequence_length", *TEXT_OPTIONS, "seed")

_WHOLE = {  # the least of each
    "steps": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "eval_steps": 1,
    "early_stopping_patience": 1,
    "held_out_samples": 1,
    "teacher_top_k": 1,
    "lora_r": 1,
    "num_samples": 2,
    "sequence_length": 2,
    "evaluation_samples": 1,
    "save_steps": 1,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig(Options):
    """How to train a pruned model towards the dense one.

    Args:
        steps: optimizer steps.
        learning_rate: highest learning rate of AdamW (betas 0.9 and 0.95, no weight decay; gradients are clipped to a
            norm of 1), > 0; a cosine takes it to 0.
        warmup_steps: steps in which the learning rate rises from 0, the first of which changes nothing. Default: a
            fifteenth of `steps`.
        batch_size: windows in a step, over all processes.
        gradient_accumulation_steps: parts that a step is computed in, one after the other: memory, and of the result
            no more than rounding.
        eval_steps: steps between two measurements on the held-out part of the text. Default: a tenth of `steps`.
        early_stopping_patience: measurements in a row, none of them better than the one before, after which training
            stops. The best state is kept in any case.
        teacher_top_k: most likely tokens of the dense model whose probabilities are written to disk before training,
            the others' together as one; the dense model is then not beside the pruned one in memory. Default: all of
            its predictions, made when they are needed.
        lora_r: rank of LoRA adapters that are trained in place of the weights, inside the mask, and folded in. Default:
            all kept weights are trained.
        bf16: compute in bfloat16 (autocast), with weights and optimizer in float32. `"auto"`: where the pruned model
            is stored so.
        gradient_checkpointing: recompute each block in the backward pass instead of storing its activations.
        task: what both models are for, as the Hub calls it, such as `"text-generation"` or `"text-classification"`. It
            decides how checkpoints are loaded, and how rows of a data set become batches. Default: what the class of
            each is for.
        label_column: column of the data set with the labels, or with the texts that are to be written. Default: one of
            a usual name, such as `label`.
        metric: what is measured beside the loss: `"accuracy"`, `"f1"` (the mean of all classes), `"wer"` or `"bleu"`.
            Default: what is usual for the task, `"accuracy"` for a classifier; perplexity for a language model; none
            for masked, translated or summarised text.
        num_samples: windows of text, or rows, held-out ones among them. Default: as many as the steps take, or as many
            as the text has; of what the dense model writes itself, 512.
        held_out_samples: windows of the text, or rows, that are never trained on, and at most a tenth of them.
        sequence_length: tokens in a window. Default: 512, or as many as the model reads of a text.
        text_column: column of the data set with the text, or with the messages of a chat. Default: `messages`,
            `conversations`, `prompt` and `completion`, `text`, or the only column of chats or else of texts,
            without those that say which text it is (`id`, `url`, `source`).
        text_template: several columns as one text, `"{instruction}\\n{output}"` say.
        assistant_only_loss: count only what the assistant says in a chat, and what ends its turn.
        packing: cut windows from all documents joined. Otherwise each window is one document, cut off at
            `sequence_length`, or padded and masked.
        document_separator: what is between documents that are packed: a text, or `"eos"` for the tokenizer's EOS token.
            Default: a blank line between texts, nothing between chats.
        add_special_tokens: begin each window of text as the tokenizer begins a text, with a BOS say.
        evaluation_samples: windows to measure perplexity and divergence on, before and after, or rows. Default: 20
            windows; of labelled rows 1,000, or as many as there are.
        seed: seed of the windows, their order, and text that the dense model writes.
        save_steps: steps between two checkpoints of a run with `resume_dir`.
    """

    elsewhere: ClassVar[NamesElsewhere] = RECOVERY
    # The training.
    steps: int = 300
    learning_rate: float = 2e-4
    warmup_steps: int | None = None
    batch_size: int = 8
    eval_steps: int | None = None
    early_stopping_patience: int = 3
    lora_r: int | None = None
    seed: int = 0
    # On what text.
    task: str | None = None
    label_column: str | None = None
    metric: str | None = None
    num_samples: int | None = None
    held_out_samples: int = 32
    sequence_length: int | None = None
    text_column: str | None = None
    text_template: str | None = None
    assistant_only_loss: bool = False
    packing: bool = True
    document_separator: str | None = None
    add_special_tokens: bool = True
    evaluation_samples: int | None = None
    # With which memory.
    teacher_top_k: int | None = None
    bf16: bool | Literal["auto"] = "auto"
    gradient_checkpointing: bool = False
    gradient_accumulation_steps: int = 1
    save_steps: int = 50

    def __post_init__(self) -> None:
        self.make_plain()
        for name, least in _WHOLE.items():
            if getattr(self, name) is not None or self.defaults()[name] is not None:
                whole(name, getattr(self, name), at_least=least)
        for name in ("task", "metric"):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), tuple(CHOICES[name]))
        check_task(self.task, self.label_column, self.metric)
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed must be at most {LARGEST_SEED}, got {self.seed}.")
        number("learning_rate", self.learning_rate, "a number > 0, like 2e-4", lambda x: x > 0)
        if not isinstance(self.gradient_checkpointing, bool):
            raise ValueError(f"gradient_checkpointing must be True or False, got {self.gradient_checkpointing!r}.")
        if self.bf16 != "auto" and not isinstance(self.bf16, bool):
            raise ValueError(f"bf16 must be True, False or 'auto', got {self.bf16!r}.")
        TextOptions.of(self)  # refuses what is wrong in it
        if self.document_separator is not None and not self.packing:
            raise ValueError(
                f"document_separator={self.document_separator!r} has no effect here: it belongs to packing=True. Set "
                "that, or leave document_separator unset."
            )
        self._check_batches()

    def _check_batches(self) -> None:
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size={self.batch_size} windows cannot be computed in gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} equal parts; choose a divisor."
            )
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is more than steps={self.steps}.")

    @property
    def warm_up(self) -> int:
        return self.steps // WARM_UP if self.warmup_steps is None else self.warmup_steps

    @property
    def distance(self) -> int:
        """Steps between two measurements on the held-out text."""
        return max(1, self.steps // EVALUATIONS) if self.eval_steps is None else self.eval_steps

    @property
    def windows(self) -> int:
        """Windows of text that are asked for: fresh ones in every step, and those that are held out."""
        return self.steps * self.batch_size + self.held_out_samples if self.num_samples is None else self.num_samples

    @classmethod
    def of_pruning(cls, config: GradProbeConfig, processes: int = 1) -> RecoveryConfig:
        """That of `recovery_steps`, on text as the calibration's.

        Args:
            processes: that share a step's windows: there are as many more as it takes to give each as many.
        """
        return cls(
            steps=config.recovery_steps,
            learning_rate=config.recovery_learning_rate,
            batch_size=cls.batch_size + -cls.batch_size % processes,
            **{name: getattr(config, name) for name in OF_THE_DATA},
        )


def resolve_recovery(config: RecoveryConfig | None) -> RecoveryConfig:
    """The configuration that was passed, or the default one.

    Raises:
        TypeError: something else was passed.
    """
    if config is None or isinstance(config, RecoveryConfig):
        return config or RecoveryConfig()
    remedy = ": RecoveryConfig.from_dict makes one of it" if isinstance(config, Mapping) else ""
    raise TypeError(f"config must be a RecoveryConfig, got {type(config).__name__} ({config!r:.80}){remedy}.")
