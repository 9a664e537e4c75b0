"""Tiny training runs: random rows, a Trainer, and a model that is half pruned."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.model.targets import find_targets
from tests import cases


class Rows(Dataset):
    """Some rows of random tokens, always the same."""

    def __init__(self, count=64, length=12, fails_at=None):
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randint(0, 256, (count, length), generator=generator)
        self.fails_at = fails_at

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == self.fails_at:
            raise RuntimeError("a broken row")
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(folder, **more):
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return TrainingArguments(output_dir=str(folder), **{**options, **more})


def trained(model, folder, callbacks, resume=None, **more):
    trainer = Trainer(model, arguments(folder, **more), train_dataset=Rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def half_pruned(name="llama", dtype=torch.float32, seed=0):
    """A model, half of each row of whose matrices is zero, and the masks."""
    model = cases.build(name, dtype, seed)
    config = GradProbeConfig(sparsity=0.5, score="magnitude", scope="row")
    result = prune_pretrained(model, config, evaluation=False, progress=False)
    return model, dict(result.masks)


def hooks_of(model):
    """Hooks of this package that are on a model."""
    found = [
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]
    for parameter in model.parameters():
        found += [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
    return [
        hook
        for hooks in found
        for hook in hooks.values()
        if (getattr(hook, "__module__", None) or "").startswith("gradprobe_hf")
    ]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def zeros(model, masks):
    """Nonzero weights under the masks, and zeros outside of them."""
    targets = {t.name: t for t in find_targets(model, include=["*"])}
    under = sum(int((targets[name].matrix(model)[mask] != 0).sum()) for name, mask in masks.items())
    beside = sum(int((targets[name].matrix(model)[~mask] == 0).sum()) for name, mask in masks.items())
    return under, beside


def trained_to_its_best(model, folder, callbacks, **more):
    """A Trainer that evaluates every second step, and loads the best of its checkpoints at the end."""
    trainer = Trainer(
        model,
        arguments(
            folder,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            **more,
        ),
        train_dataset=Rows(),
        eval_dataset=Rows(4),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer
