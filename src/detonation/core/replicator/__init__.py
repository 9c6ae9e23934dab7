"""Replicators connect a scheme to the training step: gradients before it, or parameters after it.

Only the channel passes a signal through memory, engine and exchange. `core.agreement` and
`core.optimizer` call replicators.
"""

from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel, Transfer
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.replicator.overlap import CommStream, OverlapError
from detonation.core.replicator.padding import PaddingRows, held_rows, use_rows
from detonation.core.replicator.parameter import HoldingReplicator, ParameterReplicator
