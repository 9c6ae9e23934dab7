"""Replicators: where a scheme meets the training step, before it with gradients or after it with
parameters.

The channel alone takes a signal through memory, engine and exchange. Called by agreement and
optimizer.
"""

from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel, Transfer
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.replicator.overlap import CommStream, OverlapError
from detonation.core.replicator.padding import PaddingRows, use_rows
from detonation.core.replicator.parameter import HoldingReplicator, ParameterReplicator
