"""A weight matrix, its calibration inputs and a mask -> new values of the kept weights; some choose the mask too.

`table` lists the weight updates. Each is a function on a `problem` in a file of its own, and knows no model.
"""
