"""What a forward or backward pass goes through: the loss, caches, and changes that are undone behind it."""
