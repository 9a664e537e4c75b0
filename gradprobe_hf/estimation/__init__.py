"""Configuration and model shapes -> memory, passes and operations of a run, before any of it.

`estimate` is the way in. A pass is simulated on the meta device (`passes`, `stand_ins`, `watch`) and, where that fails,
counted by `formula`; `footprint` adds up what each stage holds, `machine` tells what is free, and `peak` how
high memory was.
"""
