"""Masks and calibration inputs -> new values of the kept weights, block by block."""
