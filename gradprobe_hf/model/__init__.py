"""A Hugging Face model as pruning sees it: a list of targets, wherever Accelerate or FSDP2 keeps their weights.

`loading` -> model; `targets` -> weight matrices `[out, in]`; `parameters`, `offload_store` and `fsdp` know where each
is; `families`, `block_roles` and `config_names` hold every fact about architectures; `loss`, `block_cache` and
`patches` run it; `saving` writes it.
"""
