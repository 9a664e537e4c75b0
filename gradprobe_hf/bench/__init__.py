"""Checkpoints -> how large each is, how much memory it takes and how fast it is, beside the first.

`subject` is one loaded model and what is timed of it, `worker` a process of its own for each, `bench` lets them take
turns and counts.
"""
