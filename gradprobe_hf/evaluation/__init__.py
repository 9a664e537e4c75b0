"""Model and batches -> loss, perplexity, and the divergence from another model, with its gradient for training.

`metrics` holds measurements for the `evaluate` library.
"""
