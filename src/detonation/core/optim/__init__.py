"""The step of a base optimizer, and the optimizer SignSGD of the DeMo papers.

Users of the library call only SignSGD, as `detonation.SignSGD`. Inside the library only
`core.replicator` and `Replicated` call this package.
"""

from detonation.core.optim.base_step import BaseStep, hooks_after, hooks_before, hooks_of, unheard
from detonation.core.optim.signsgd import Deferred, SignSGD
from detonation.core.optim.wrapper import OptimizerWrapper, evaluated
