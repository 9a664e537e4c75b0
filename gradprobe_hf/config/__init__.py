"""Options -> a validated, frozen `GradProbeConfig`.

`values` says what an option may be by itself, `presets` which methods have a name, `config` what goes together.
"""
