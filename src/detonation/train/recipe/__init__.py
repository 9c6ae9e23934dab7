"""Recipes: from a TOML file, `--set` and flags to one frozen `Config`, checked before anything
starts."""
