"""One weight matrix, its calibration inputs and a mask -> new values of the kept weights; some choose the mask too.

`table` lists the updates. Each is a function on tensors in a file of its own, and knows no model.
"""
