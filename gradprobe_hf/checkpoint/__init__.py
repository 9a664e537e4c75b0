"""A pruned model -> a checkpoint on disk or on the Hub, and back to its true sparsity."""
