"""Text: rows of a data set as documents or chats, and windows of their tokens.

`pydoc_text` is the built-in text, `self_generated` the model's own.
"""
