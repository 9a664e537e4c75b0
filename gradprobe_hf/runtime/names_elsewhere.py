"""Names elsewhere: what other libraries, and earlier habits, call an option -> what it is called here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

# torch.nn.utils.prune, llm-compressor, Wanda, SparseGPT, optimum, transformers, PEFT and TRL.
_OF_BOTH = {
    "nsamples": "num_samples",
    "num_calibration_samples": "num_samples",
    "max_samples": "num_samples",
    "n_samples": "num_samples",
    "seqlen": "sequence_length",
    "seq_len": "sequence_length",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "block_size": "sequence_length",
    "per_device_train_batch_size": "batch_size",
    "random_seed": "seed",
}
_OPTIONS_OF_PRUNING = {
    **_OF_BOTH,
    "amount": "sparsity",
    "ratio": "sparsity",
    "density": "sparsity",
    "pruning_ratio": "sparsity",
    "sparsity_ratio": "sparsity",
    "sparsity_level": "sparsity",
    "target_sparsity": "sparsity",
    "final_sparsity": "sparsity",
    "mask_structure": "pattern",
    "sparsity_type": "pattern",
    "sparsity_pattern": "pattern",
    "n": "pattern",
    "m": "pattern",
    "prunen": "pattern",
    "prunem": "pattern",
    "method": "score",
    "prune_method": "score",
    "pruning_method": "score",
    "strategy": "score",
    "criterion": "score",
    "importance": "score",
    "metric": "score",
    "decision": "probes",
    "reconstruction": "update",
    "weight_update": "update",
    "percdamp": "damping",
    "dampening_frac": "damping",
    "gradient_checkpointing": "checkpointing",
    "targets": "include",
    "target_modules": "include",
    "modules_to_prune": "include",
    "ignore": "exclude",
    "skip": "exclude",
    "exclude_modules": "exclude",
    "modules_to_not_convert": "exclude",
    "save_steps": "save_every",
}
_OPTIONS_OF_RECOVERY = {
    **_OF_BOTH,
    "max_steps": "steps",
    "num_steps": "steps",
    "train_steps": "steps",
    "training_steps": "steps",
    "num_training_steps": "steps",
    "recovery_steps": "steps",
    "lr": "learning_rate",
    "recovery_learning_rate": "learning_rate",
    "num_warmup_steps": "warmup_steps",
    "warmup": "warmup_steps",
    "train_batch_size": "batch_size",
    "patience": "early_stopping_patience",
    "r": "lora_r",
    "rank": "lora_r",
    "lora_rank": "lora_r",
    "top_k": "teacher_top_k",
    "checkpointing": "gradient_checkpointing",
    "save_every": "save_steps",
}
_ARGUMENTS_OF_BOTH = {
    "tokenizer": "processing_class",
    "processor": "processing_class",
    "image_processor": "processing_class",
    "feature_extractor": "processing_class",
    "eval_dataset": "evaluation",
    "eval_data": "evaluation",
    "test_dataset": "evaluation",
    "evaluation_data": "evaluation",
    "save": "output_dir",
    "save_dir": "output_dir",
    "save_directory": "output_dir",
    "output": "output_dir",
    "hub_model_id": "push_to_hub",
    "hub_private": "hub_private_repo",
    "private": "hub_private_repo",
    "resume_from_checkpoint": "resume_dir",
    "torch_dtype": "dtype",
}
_MODELS = ("model", "model_name", "model_id", "model_name_or_path", "pretrained_model_name_or_path")
_TEXTS = ("dataset", "data", "calibration_data", "calibration_dataset", "calib_data", "train_dataset")
_ARGUMENTS_OF_PRUNING = {
    **_ARGUMENTS_OF_BOTH,
    **dict.fromkeys(_TEXTS, "calibration"),
    **dict.fromkeys(_MODELS, "model_or_id"),
    "args": "config",
    "recipe": "config",
    "gradprobe_config": "config",
    "pruning_config": "config",
    "loss": "loss_fn",
    "compute_loss": "loss_fn",
    "compute_loss_func": "loss_fn",
    "compute_metrics": "metric_fn",
    "metrics": "metric_fn",
    "device": "device_map",
}
_ARGUMENTS_OF_RECOVERY = {
    **_ARGUMENTS_OF_BOTH,
    **dict.fromkeys((*_TEXTS, "calibration"), "text"),
    **dict.fromkeys((*_MODELS, "model_or_id"), "pruned"),
    "student": "pruned",
    "student_model": "pruned",
    "dense": "teacher",
    "teacher_model": "teacher",
    "args": "config",
    "recovery_config": "config",
}


@dataclass(frozen=True)
class NamesElsewhere:
    """What others call the options of a configuration, and the arguments of the function that takes it.

    Attributes:
        config: the name of its class.
        verb: that of the function.
        first: options to look at first.
        example: an option, and a value of it.
    """

    config: str
    verb: str
    first: str
    example: tuple[str, object]
    options: Mapping[str, str]
    arguments: Mapping[str, str]


PRUNING = NamesElsewhere(
    "GradProbeConfig",
    "prune_pretrained",
    "sparsity and pattern",
    ("sparsity", 0.5),
    _OPTIONS_OF_PRUNING,
    _ARGUMENTS_OF_PRUNING,
)
RECOVERY = NamesElsewhere(
    "RecoveryConfig",
    "recover_pretrained",
    "steps and learning_rate",
    ("steps", 100),
    _OPTIONS_OF_RECOVERY,
    _ARGUMENTS_OF_RECOVERY,
)


def near(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """What was meant, if anything known looks like it. Args: alike: how much, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=alike)), None)


def unknown_option(name: object, known: Collection[str], elsewhere: NamesElsewhere = PRUNING) -> str:
    """What to say of an option that the configuration does not have.

    >>> unknown_option("amount", ["sparsity"])
    "unknown option 'amount': it is called sparsity here."
    >>> unknown_option("sparsty", ["sparsity"])
    "unknown option 'sparsty'; did you mean 'sparsity'?"
    """
    text = str(name)
    if text in elsewhere.options:
        return f"unknown option {name!r}: it is called {elsewhere.options[text]} here."
    argument = elsewhere.arguments.get(text, text)
    if argument in elsewhere.arguments.values():
        return f"{name!r} is no option of the configuration: it is an argument of {elsewhere.verb}, {argument}=."
    if meant := near(text, known):
        return f"unknown option {name!r}; did you mean {meant!r}?"
    return f"unknown option {name!r}; the options are those of {elsewhere.config}, {elsewhere.first} first."


def unknown_argument(
    name: str, value: object, options: Collection[str], arguments: Collection[str], elsewhere: NamesElsewhere = PRUNING
) -> str | None:
    """What to say of an argument that is another's, or of the configuration; None if nothing is known of it.

    >>> unknown_argument("tokenizer", None, ["sparsity"], ["calibration", "processing_class"])
    'tokenizer= is called processing_class= here.'
    >>> unknown_argument("sparsity", 0.5, ["sparsity"], ["calibration"])
    'sparsity is an option of the configuration: pass GradProbeConfig(sparsity=0.5) as config.'
    """
    option = name if name in options else elsewhere.options.get(name)
    if option in options:
        return f"{name} is an option of the configuration: pass {elsewhere.config}({option}={value!r}) as config."
    other = elsewhere.arguments.get(name)
    if other in arguments:
        return f"{name}= is called {other}= here."
    meant = near(name, arguments, alike=0.85)  # other words may be arguments of `from_pretrained`
    return None if meant in (None, name) else f"there is no argument {name}=; did you mean {meant}=?"
