"""Colors of all figures: the dense model's, the pruned one's, words, words beside them, and what is not there."""

DENSE, PRUNED, INK, MUTED, ABSENT = "#9aa5b1", "#2f6f9f", "#1f2933", "#616e7c", "#d5d9dd"
