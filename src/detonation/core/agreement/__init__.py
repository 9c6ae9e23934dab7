"""Agreement of all ranks: whether to stop training, whether replicas are equal, and whether ranks
decode messages to the same bits.

The functions that compare ranks are collective. Only `core.optimizer` calls these functions. Of
this package, users of the library need only `Safety`.
"""

from detonation.core.agreement.buffers import BufferSync, persistent_buffers
from detonation.core.agreement.clipping import Clip
from detonation.core.agreement.consensus import HalfStep, StopConsensus
from detonation.core.agreement.desync import Difference, differences, members_of, options_of
from detonation.core.agreement.gates import StepGate
from detonation.core.agreement.options import python_number, recorded_options, take_recorded
from detonation.core.agreement.safety import Safety
from detonation.core.agreement.self_tests import (
    CLOSE,
    NORM_SELFTEST,
    STEP_SELFTEST,
    TESTS,
    StepTest,
    norm_selftest,
    register_step_test,
    rounds_by_place,
    selftest,
    selftest_conditions,
)
