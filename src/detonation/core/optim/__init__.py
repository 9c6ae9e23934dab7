"""Optimizers for the local step: SignSGD as in DeMo's papers, and a Muon that is correct on shards.

Users call them through `detonation`; inside the package only `core.replicator` and `Replicated` do.
"""
