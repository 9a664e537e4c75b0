"""Amounts of structures and a model -> which of its parts go together, and a smaller model of what is left.

A structure is an FFN channel, a group of attention heads, an expert or a block. `table` has one row for each kind,
`plan` finds them in a model, `unit_scores` has the ways to tell which of them go (`importance` that of Optimal Brain
Surgeon), `removal` these as masks and as slices of tensors, and `shapes` the configuration of what is left.
"""
