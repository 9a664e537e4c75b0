"""Amounts of structures and a model -> which of its parts go together, and a smaller model of what is left.

A structure is an FFN channel, a group of attention heads or a block. `table` has one row for each kind, `plan` finds
them in a model, `importance` says what they are worth, `removal` which of them go, as masks and as slices of tensors,
and `shapes` the configuration of what is left.
"""
