"""Muon, an optimizer of whole matrices that are sharded inside a node.

Users call Muon through `detonation`. Nothing in `core` knows Muon: this package registers how the
self-test of all ranks makes a step of Muon.
"""
