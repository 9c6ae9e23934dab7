"""Muon, an optimizer of whole matrices that are sharded inside a node.

Users call it through `detonation`. Nothing in `core` knows it: it registers how the self-test of
all ranks steps it.
"""
