"""Statistics of a weight matrix -> a score for each weight, `[out, in]`; the lowest are pruned first.

`table` lists the scores. Each is a pure function on tensors in a file of its own, and reads its `evidence`.
`budget` is how many weights go, `groups` which have the lowest scores of a row or a group.
"""
