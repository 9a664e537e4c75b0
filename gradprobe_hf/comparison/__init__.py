"""Several configurations, one model, text and budget -> a row of each, measured alike.

`compare` is the public verb, `rows` does the work, `baselines` are what a configuration is compared with.
"""
