"""What is asked for: refused before any work where it cannot be done, and loaded.

`checks` sees arguments alone, `compatibility` the model's matrices, `inputs` loads model and texts, within the
`weight_limits` of the devices; `foreseen` tells what the user may not know.
"""
