"""Engines with compiled kernels, under the laws of the reference engine.

`core.engine.choice` finds them by name.
"""
