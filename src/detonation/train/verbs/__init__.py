"""The commands other than `train`: compare, simulate, probe, plan, export and follow, one file
each.
"""
