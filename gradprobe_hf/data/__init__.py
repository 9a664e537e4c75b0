"""Whatever a user names as text or batches -> `Batches`: the same sequences, in the same order, in every pass.

`sources` opens files and Hub datasets, `windows` cuts and draws, `batches` is the result; `pydoc_text` is the built-in
text, `self_generated` the model's own.
"""
