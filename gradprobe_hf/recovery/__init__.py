"""Recovery: a pruned model, the dense one and text -> the kept weights, trained towards the dense model's predictions.

`teacher` is where the dense model's predictions come from, `text` what is trained on, `trainer` the Trainer, whose loss
is in `evaluation/divergence_loss.py`, `distil` a whole training; `recover` is the public verb.
"""
