"""Names elsewhere: what other libraries, and earlier habits, call an option -> what it is called here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

# torch.nn.utils.prune, llm-compressor, Wanda, SparseGPT, optimum, transformers and TRL; options of `GradProbeConfig`.
OPTIONS_ELSEWHERE: dict[str, str] = {
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
    "gradient_checkpointing": "checkpointing",
    "targets": "include",
    "target_modules": "include",
    "modules_to_prune": "include",
    "ignore": "exclude",
    "skip": "exclude",
    "exclude_modules": "exclude",
    "modules_to_not_convert": "exclude",
    "random_seed": "seed",
    "save_steps": "save_every",
}
# Arguments of `prune_pretrained` and the functions beside it.
ARGUMENTS_ELSEWHERE: dict[str, str] = {
    "model": "model_or_id",
    "model_name": "model_or_id",
    "model_id": "model_or_id",
    "model_name_or_path": "model_or_id",
    "pretrained_model_name_or_path": "model_or_id",
    "args": "config",
    "recipe": "config",
    "gradprobe_config": "config",
    "pruning_config": "config",
    "tokenizer": "processing_class",
    "processor": "processing_class",
    "image_processor": "processing_class",
    "feature_extractor": "processing_class",
    "dataset": "calibration",
    "data": "calibration",
    "calibration_data": "calibration",
    "calibration_dataset": "calibration",
    "calib_data": "calibration",
    "train_dataset": "calibration",
    "eval_dataset": "evaluation",
    "eval_data": "evaluation",
    "test_dataset": "evaluation",
    "evaluation_data": "evaluation",
    "loss": "loss_fn",
    "compute_loss": "loss_fn",
    "compute_loss_func": "loss_fn",
    "compute_metrics": "metric_fn",
    "metrics": "metric_fn",
    "save": "output_dir",
    "save_dir": "output_dir",
    "save_directory": "output_dir",
    "output": "output_dir",
    "hub_model_id": "push_to_hub",
    "resume_from_checkpoint": "resume_dir",
    "torch_dtype": "dtype",
    "device": "device_map",
}


def near(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """What was meant, if anything known looks like it. Args: alike: how much, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=alike)), None)


def unknown_option(name: object, options: Collection[str]) -> str:
    """What to say of an option that the configuration does not have.

    >>> unknown_option("amount", ["sparsity"])
    "unknown option 'amount': it is called sparsity here."
    >>> unknown_option("sparsty", ["sparsity"])
    "unknown option 'sparsty'; did you mean 'sparsity'?"
    """
    text = str(name)
    if text in OPTIONS_ELSEWHERE:
        return f"unknown option {name!r}: it is called {OPTIONS_ELSEWHERE[text]} here."
    argument = ARGUMENTS_ELSEWHERE.get(text, text)
    if argument in ARGUMENTS_ELSEWHERE.values():
        return f"{name!r} is no option of the configuration: it is an argument of prune_pretrained, {argument}=."
    if meant := near(text, options):
        return f"unknown option {name!r}; did you mean {meant!r}?"
    return f"unknown option {name!r}; the options are those of GradProbeConfig, sparsity and pattern first."


def unknown_argument(name: str, value: object, options: Collection[str], arguments: Collection[str]) -> str | None:
    """What to say of an argument that is another's, or of the configuration; None if nothing is known of it.

    >>> unknown_argument("tokenizer", None, ["sparsity"], ["calibration", "processing_class"])
    'tokenizer= is called processing_class= here.'
    >>> unknown_argument("sparsity", 0.5, ["sparsity"], ["calibration"])
    'sparsity is an option of the configuration: pass GradProbeConfig(sparsity=0.5) as config.'
    """
    option = name if name in options else OPTIONS_ELSEWHERE.get(name)
    if option in options:
        return f"{name} is an option of the configuration: pass GradProbeConfig({option}={value!r}) as config."
    other = ARGUMENTS_ELSEWHERE.get(name)
    if other in arguments:
        return f"{name}= is called {other}= here."
    meant = near(name, arguments, alike=0.85)  # other words may be arguments of `from_pretrained`
    return None if meant in (None, name) else f"there is no argument {name}=; did you mean {meant}=?"
