"""Links: a communicator sends bytes between replicas, and a link counts these bytes.

During a step, no other package uses the network. Replicators, `core.agreement`, the planner and the
trainer call this package.
"""

from detonation.core.link.communicator import (
    Axis,
    Communicator,
    ProcessGroupCommunicator,
    axis_named,
    carries,
    communicator_of,
    divided,
    require_device,
    rules_of,
)
from detonation.core.link.coordinates import (
    Coordinates,
    Level,
    alike,
    coordinates_of,
    key_of_axis,
    placed,
    replicas_along,
    sizes_of,
)
from detonation.core.link.elastic_communicator import (
    ElasticCommunicator,
    HandOver,
    PeerLost,
    RenumberedCommunicator,
    TextExchange,
)
from detonation.core.link.hierarchical import is_sharded_over, sharding_ranks, split_by_sharding
from detonation.core.link.link import (
    SAME_START,
    Link,
    Mismatch,
    first_text,
    links_of_shards,
    mismatch_on_all,
    require_same,
    send_to_all,
)
