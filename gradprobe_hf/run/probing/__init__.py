"""Single weights: the `schedule` of probes, one `probe_pair` for the whole model or, `sequential`, one a step.

`pair_masks` selects by what a pair has measured, `row_fisher` is what weight updates read of it, and `probe_state` what
a snapshot holds.
"""
