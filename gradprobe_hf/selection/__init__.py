"""Scores and a budget -> masks that meet the budget to the element, without sorting or concatenating.

`keys` makes scores sortable, `cut` finds where the budget ends, `select` applies it; `bounds` are budgets of matrices;
`packed_masks` keeps the result in one bit a weight.
"""
