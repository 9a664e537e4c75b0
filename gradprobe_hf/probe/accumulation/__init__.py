"""Sums `[out, in]` of non-negative values, in memory or in files, in float32, bfloat16 or int8."""
