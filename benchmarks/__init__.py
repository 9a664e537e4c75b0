"""Benchmarks, their results as JSON under `results/`, and what shows these: `readme_table.py` and `picture.py`."""
