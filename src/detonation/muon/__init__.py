"""Muon, an optimizer of whole matrices that are sharded inside a node.

Users call Muon through `detonation`. Nothing in `core` knows Muon. Therefore this package registers
how the self-test, which all ranks run, makes a step of Muon.
"""
