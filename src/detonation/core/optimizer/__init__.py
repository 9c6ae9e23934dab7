"""`replicate` and the optimizer that it returns: its levels, state, statistics and reconfiguration.

This is the top layer of core. Users call it through `detonation`; checkpoint, plan and train import
it directly.
"""
