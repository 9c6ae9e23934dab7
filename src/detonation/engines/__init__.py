"""Engines with compiled kernels, under the laws of the reference engine.

`core.engine.reference` finds them by name.
"""
