"""Whole structures: which of them go, and, with a budget, how many of each.

`structured` decides which, by `unit_evidence` and `block_order`. `budget` lists the shapes that meet one, `latency`
times them, `estimates` says what each may lose, and `search` prunes the best of them. `equality` is the check that the
smaller model computes what the masked one did.
"""
