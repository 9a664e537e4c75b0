"""Tables that the verbs print, where one is more than a few lines."""
