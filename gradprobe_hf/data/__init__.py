"""Whatever a user names as text or batches -> `Batches`: the same sequences, in the same order, in every pass.

`sources` opens files and Hub datasets, `text` has what makes windows of documents and chats, and `labelled` what makes
batches of rows with labels; `windows` chooses between them, `batches` is the result, and `held_out` a part of it.
"""
