"""Benchmarks: each prints one table and writes one JSON under `benchmarks/results/`."""
