"""Engines with compiled kernels, which must compute the bits of the reference engine.

`core.engine.reference` finds these engines by name.
"""
