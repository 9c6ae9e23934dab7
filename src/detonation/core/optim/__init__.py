"""Optimizers for the local step: SignSGD, the one of DeMo's papers, and Muon, right on shards.

Users call them through `detonation`; inside the package only replicators and `Replicated` do.
"""
