"""Statistics and candidates -> masks."""
