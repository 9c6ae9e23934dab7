"""The commands besides `train`: compare, simulate, probe, plan and export, one file each.

Imports from every other folder of `train`; only `cli` may import from here.
"""
