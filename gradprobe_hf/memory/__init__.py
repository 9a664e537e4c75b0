"""A run context -> the same with batches that fit into memory and a place for its accumulators.

`memory_plan` is the way in: `batch_size` and `checkpointing` choose by
`measured_passes`, `accumulator_files` holds what goes to disk, and
`memory_errors` says what would help where memory runs out all the same. No result depends on any of it.
"""
