"""The step of a base optimizer, and SignSGD as in DeMo's papers.

Users call SignSGD through `detonation`. Inside the package only `core.replicator` and `Replicated`
call them.
"""

from detonation.core.optim.base_step import BaseStep, hooks_after, hooks_before, hooks_of, unheard
from detonation.core.optim.signsgd import Deferred, SignSGD
from detonation.core.optim.wrapper import OptimizerWrapper, evaluated
