"""Configuration, model and data -> a pruning decision, and the decision -> pruned weights."""
