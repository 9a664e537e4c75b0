"""A configuration, a model and its data -> a pruning decision; and the decision -> pruned weights.

`inputs` loads, `compatibility` refuses, `memory_plan` fits the batches: that makes the `context`, which `decide` hands
through `schedule`, `sequential` and `probe_pair`. `apply` writes the result, `snapshots` resume a killed run.
"""
