"""Modules that compute as before, and fold the inputs and output gradients of their weight into statistics."""
