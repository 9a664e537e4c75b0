"""Model and batches -> statistics: forward and backward passes that measure gradients at each weight matrix."""
