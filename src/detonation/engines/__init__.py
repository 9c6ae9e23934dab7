"""Engines with compiled kernels, which must compute the same bits as the reference engine.

`core.engine.reference` finds these engines by name.
"""
