"""Fixing: a script into which changes from outside make it faster, by how much, and what they do to its loss."""
