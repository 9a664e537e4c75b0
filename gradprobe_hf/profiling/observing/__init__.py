"""Observing: a loop that runs into an `Observation` of some of its steps; everything is put back."""
