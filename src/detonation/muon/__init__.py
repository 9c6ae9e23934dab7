"""Muon, an optimizer of whole matrices that are sharded inside a node.

Users call Muon through `detonation`. `core` does not import this package. Therefore this package
tells the self-test of `core`, which all ranks run, how to test a step of Muon.
"""
