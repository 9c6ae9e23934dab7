"""Optimizers for the local step: SignSGD as in DeMo's papers, and a Muon that is correct on shards.

Users call them through `detonation`; inside the package only `core.replicator` and `Replicated` do.
"""

from detonation.core.optim.base_step import BaseStep, hooks_after, hooks_before, hooks_of, unheard
from detonation.core.optim.muon import Muon
from detonation.core.optim.signsgd import Deferred, SignSGD
from detonation.core.optim.wrapper import OptimizerWrapper, evaluated
