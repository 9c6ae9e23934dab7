"""Optimizers for the local step: SignSGD, as in DeMo's papers, and Muon, correct on shards.

Users call them through `detonation`; inside the package only replicators and `Replicated` do.
"""
