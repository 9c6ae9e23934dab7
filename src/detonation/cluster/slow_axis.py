"""The communicator of the axis between replicas: its backend, and with NCCL its stream."""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def slow_axis_backend(axis: str, device: str, chosen: str | None) -> dict[int | str, Any] | None:
    """The `backend_override` of `init_device_mesh`; None where the default group may serve the axis.

    With NCCL the axis gets a communicator of its own, also where it has all ranks. Its kernels run on a stream of high
    priority, so that a short message between replicas does not queue behind the kernels of backward.

    Args:
        axis: The name of the mesh axis between replicas.
        device: The device's type.
        chosen: One of `SLOW_BACKENDS`, or None.
    """
    if chosen is not None:
        return {axis: chosen}
    if device != "cuda":
        return None
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if backends.get("cuda") != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # torch takes the time from options where it is given some; until then it has that of the default group's kind
    options._timeout = distributed_c10d._get_default_timeout(dist.get_backend())
    # the axis carries tensors of the same devices as the default group; a lone name lets NCCL split that group
    name = "nccl" if set(backends.values()) == {"nccl"} else ",".join(f"{d}:{b}" for d, b in backends.items())
    return {axis: (name, options)}
