"""Replicators connect a scheme to the training step: they exchange gradients before the step of the
base optimizer, or parameters after it.

The channel of a replicator adds a signal to the memory of unsent values, encodes a message and
exchanges it; no other class does so. `core.agreement` and `core.optimizer` call replicators.
"""

from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel, Transfer
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.replicator.overlap import CommStream, OverlapError
from detonation.core.replicator.padding import PaddingRows, held_rows, use_rows
from detonation.core.replicator.parameter import HoldingReplicator, ParameterReplicator
