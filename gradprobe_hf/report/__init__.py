"""A finished run -> what a person reads of it: `build` makes the `report`; `plots` and the `card` show it."""
