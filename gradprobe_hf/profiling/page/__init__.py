"""The report as one HTML page: its tables, and three pictures, without a script or anything from elsewhere."""

from gradprobe_hf.profiling.page.page import page

__all__ = ["page"]
