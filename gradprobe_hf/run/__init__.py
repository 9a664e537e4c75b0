"""A configuration, a model and its data -> a pruning decision; and the decision -> pruned weights.

`inputs` loads what the `context` holds and `compatibility` refuses what cannot be pruned; `decide` hands the context
through `schedule`, `sequential` and `probe_pair`, and `pair_masks` selects by what these have measured. `evaluate`
measures what the `decision` does, `apply` writes the result, `snapshots` resume a killed run.
"""
