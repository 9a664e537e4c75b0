"""From a name to a model, its weights complete and its adapters folded in, and the tokenizer or processor beside it.

`checks` sees arguments alone, `load` does what is asked for, `report` tells what of the checkpoint was not read.
"""
