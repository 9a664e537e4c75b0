"""A report -> the model card: `build` fills a template; each other file says what the card says of one thing."""
