"""Scores: how much a weight matters, one pure function on tensors per file. Lowest goes first; none is negative.

Layout: `weight [out, in]`, every score `[out, in]`.
"""

from gradprobe_hf.scores.fisher import blended_fisher, fisher_score
from gradprobe_hf.scores.magnitude import magnitude_score
from gradprobe_hf.scores.random import random_score
from gradprobe_hf.scores.wanda import wanda_score

__all__ = ["blended_fisher", "fisher_score", "magnitude_score", "random_score", "wanda_score"]
