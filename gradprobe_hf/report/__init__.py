"""A finished run -> its report, plots and model card."""
