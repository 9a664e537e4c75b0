"""Model and batches -> statistics: forward and backward passes that measure gradients at each weight matrix.

`engine` makes the passes, over the batches that `steps` are of; `maps` fold what they see of each matrix into
`statistics`, which are sums in `accumulation`.
"""
