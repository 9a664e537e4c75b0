"""A Hugging Face model as pruning sees it: a list of targets, wherever Accelerate or FSDP2 keeps their weights.

`loading` -> model; `targets` -> weight matrices `[out, in]`; `parameters` and `fsdp` know where each is, and `files`
what of it is on disk; `families`, `block_roles` and `config_names` hold every fact about architectures; `passes` is
what a pass goes through.
"""
