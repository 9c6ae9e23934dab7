"""`replicate` and the optimizer that it returns: building levels, their state, statistics and
reconfiguration.

The top of core. Users call it through `detonation`; checkpoint, plan and train call it here.
"""
