"""Statistics of a weight matrix -> a score for each weight, `[out, in]`; the lowest are pruned first."""
