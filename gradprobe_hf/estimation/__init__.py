"""Configuration and model shapes -> memory, passes and operations of a run, before any of it."""
