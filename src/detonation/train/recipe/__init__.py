"""Recipes: a TOML file, `--set` and flags become one frozen `Config`, checked before the start."""
