"""Recovery: a pruned model, the dense one and text -> the kept weights, trained towards the dense model's predictions.

`divergence` is the loss, `teacher` where the dense model's predictions come from, `text` what is trained on, `trainer`
the Trainer, `distil` a whole training; `recover` is the public verb.
"""
