"""A finished run -> what a person reads of it: `build` makes the `report`, `plots` and `card` show it."""
