"""A Hugging Face model as pruning sees it: loading, families, targets, where each weight is stored, loss and saving."""
