"""Whatever a user names as text or batches -> `Batches`: the same sequences in the same order in every pass."""
