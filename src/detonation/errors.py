"""The public names of this library's errors. No module of the package imports this module."""

from detonation.checkpoint.files.shard_file import CorruptCheckpoint
from detonation.checkpoint.newest import NoCheckpoint
from detonation.checkpoint.shard_saver import NotSaved
from detonation.cluster.survive.agreement import ReplicaLeft, ReplicaLost
from detonation.core.agreement import HalfStep
from detonation.core.base_error import DetonationError
from detonation.core.integrity.fault_counts import BadPeer, Desync, NonFiniteGradient
from detonation.core.link import Mismatch, PeerLost
from detonation.core.replicator import OverlapError
from detonation.core.schemes import LargerThanDense
from detonation.feed.token import LostFeed
from detonation.log.records import DamagedLog

__all__ = [
    "BadPeer",
    "CorruptCheckpoint",
    "DamagedLog",
    "Desync",
    "DetonationError",
    "HalfStep",
    "LargerThanDense",
    "LostFeed",
    "Mismatch",
    "NoCheckpoint",
    "NonFiniteGradient",
    "NotSaved",
    "OverlapError",
    "PeerLost",
    "ReplicaLeft",
    "ReplicaLost",
]
