"""Weights on disk: those that Accelerate keeps there, and a model written one file in memory at a time."""
