"""`replicate`, and the optimizer that it returns: levels of replication, state, statistics, and
changes of settings during a run.

This package is the highest layer of `core`. Users call it through `detonation`; the packages
checkpoint, plan and train import it directly.
"""

from detonation.core.optimizer.build import Settings
from detonation.core.optimizer.gathered import local_parameters, reshard
from detonation.core.optimizer.replicate import replicate
from detonation.core.optimizer.replicated import Replicated
from detonation.core.optimizer.setup_checks import check_arguments, checked_levels
from detonation.core.optimizer.state import (
    fitting_state,
    load_replica_state,
    local_state_of,
    parameters_of,
    replica_state,
)
from detonation.core.optimizer.stats import Stats
