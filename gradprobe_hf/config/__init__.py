"""Options -> a validated, frozen `GradProbeConfig`.

`fields` says what there is, `values` what an option may be by itself, `presets` which methods have a name, `defaults`
what is not given, `derived` what it all comes to, `together` what goes with what; `config` is what users make.
"""
