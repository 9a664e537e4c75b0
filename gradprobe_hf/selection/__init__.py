"""Scores and a budget -> masks that meet the budget to the element."""
