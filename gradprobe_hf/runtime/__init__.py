"""What any long-running program needs, with no knowledge of pruning.

`processes` (collectives), `stopwatch` (seconds per stage), `interrupts` (Ctrl-C), `yaml_options`, `row_chunks`,
`half_products`.
"""
