"""A configuration, a model and its data -> a pruning decision; and the decision -> pruned weights.

`request` checks what is asked for and loads what the `context` holds; `reach` leaves out what no gradient gets to.
`decide` hands the context to `probing`, where single weights go, or to `shapes`, where whole structures do. `evaluate`
measures what the `decision` does, `apply` writes the result, `snapshots` resume a killed run.
"""
