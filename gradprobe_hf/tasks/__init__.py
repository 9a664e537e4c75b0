"""Tasks: what is known about a model by what it is for, as the Hub names it.

How it is loaded, what a batch of it is made of, which column holds its labels, what is counted, and which metric
judges it. `table.py` has a row for each task; nothing else asks which task it is.
"""
