"""The commands besides `train`: compare, simulate, probe, plan, export and follow, one file each.

Imports from every other folder of `train`; only `cli` may import from here.
"""
