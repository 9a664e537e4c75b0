"""Model and batches -> loss and perplexity. `metrics` holds measurements for the `evaluate` library."""
