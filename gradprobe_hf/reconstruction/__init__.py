"""A model, masks and calibration batches -> new values of its kept weights, block by block.

`reconstruct` walks the blocks, `hessians` collects what a weight update needs, `new_weights` keeps the result beside
the model.
"""
