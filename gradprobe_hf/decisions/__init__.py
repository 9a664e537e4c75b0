"""Scores and up to two probes -> which weights go.

`table` lists the decisions; `needs` tells what a method has to measure before it can decide; `search` is the way to a
metric's limit.
"""
