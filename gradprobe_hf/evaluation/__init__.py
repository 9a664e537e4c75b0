"""Model and batches -> loss and perplexity."""
