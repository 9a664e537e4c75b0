"""One probe pair -> the sparsity and loss of many thresholds: `sweep` is the verb."""
