"""Recipes: a TOML file, `--set` and flags become one frozen `Config`. It is checked before the run
starts.
"""
