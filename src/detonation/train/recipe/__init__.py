"""Recipes: from a TOML file, `--set` and flags to one frozen `Config`, checked before anything starts.

Imports from no other folder of `train`; every one of them may import from here.
"""
