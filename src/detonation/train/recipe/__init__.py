"""Recipes: a TOML file, `--set` and flags become one frozen `Config`, which is checked before the
run starts.
"""
