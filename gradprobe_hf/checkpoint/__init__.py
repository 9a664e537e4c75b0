"""A pruned model -> a checkpoint on disk (`write`) or on the Hub (`push`), and back to its zeros (`inspect`).

`result` is what `prune_pretrained` returns.
"""
