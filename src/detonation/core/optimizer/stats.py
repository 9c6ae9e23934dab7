"""Statistics of a replicated optimizer: bytes, waiting time and omitted contributions."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from detonation.core.agreement import StopConsensus
from detonation.core.flat.tensors import local
from detonation.core.link import Level, Link, split_by_sharding
from detonation.core.optimizer.trained import TrainedParameters
from detonation.core.round import LocalSteps
from detonation.core.runtime import decides_on_device
from detonation.core.schemes import arguments_text, collective_for, dense_bytes, mean_bytes


class Stats:
    """Statistics since the optimizer was created: what this rank has sent, how long it has waited,
    and which contributions of replicas were omitted.

    Args:
        links: Links of each level, from the innermost tier of the network to the outermost.
        consensus: None before the first step.
        step: How many steps were taken.
        grad_norm: The global norm of the gradients of the last step before clipping, `[]` fp32 on
            their device; None without `clip`, and if the base optimizer uses only signs. Reading
            the norm waits for the device.
    """

    def __init__(
        self,
        links: Sequence[Sequence[Link]],
        consensus: StopConsensus | None,
        step: int,
        grad_norm: Tensor | None = None,
    ) -> None:
        self.grad_norm = grad_norm
        self._links = links
        self._step = step
        if consensus:
            self._counts = consensus.counts
        else:
            self._counts = []
        self._local_steps: LocalSteps | None = None
        if consensus:
            self._local_steps = consensus.runtime.local_steps
        for counts in self._counts:
            counts.catch_up(step - 1)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other replicas."""
        return sum(self.bytes_sent_by_level)

    @property
    def bytes_sent_by_level(self) -> list[int]:
        """Bytes that this rank has sent to other replicas, for each level of replication."""
        return [sum(link.bytes_sent for link in links) for links in self._links]

    @property
    def waited_s(self) -> float:
        """Seconds for which this rank's host was blocked by an unfinished exchange."""
        return sum(link.waited_s for links in self._links for link in links)

    @property
    def local_steps(self) -> list[int]:
        """The number of local steps that each replica runs per round with `balance`; an empty list
        without `balance`.
        """
        if self._local_steps is None:
            return []
        return self._local_steps.counts.tolist()

    @property
    def taking(self) -> int | None:
        """The number of replicas that take part in the next step under `balance`; None without
        `balance`.
        """
        if self._local_steps is None:
            return None
        return int(self._local_steps.taken(self._step).sum())

    @property
    def skipped(self) -> int:
        """The number of contributions, of all replicas, that were omitted because a gradient was
        not finite.
        """
        return sum(counts.skipped for counts in self._counts)

    @property
    def skipped_by_parameter(self) -> dict[str, int]:
        """The value of `skipped` for each parameter, by the parameter's name."""
        return dict(sum((counts.by_parameter for counts in self._counts), Counter()))

    @property
    def refused(self) -> int:
        """The number of messages, of all replicas, that failed validation and were not used."""
        return sum(counts.refused for counts in self._counts)


def dense_bytes_by_level(
    parameters: Mapping[str, Tensor],
    levels: Sequence[Level],
    intra_node: DeviceMesh | None,
) -> list[int]:
    """Returns, for each level of replication, the bytes that this rank would send per step if all
    gradients were averaged in fp32.
    """
    ways = [
        (sum(local(p).numel() for p in way.values()), n)
        for way, n in split_by_sharding(parameters, intra_node)
    ]
    return [sum(dense_bytes(numel, axis.size(), n) for numel, n in ways) for axis, _ in levels]


def described(
    trained: TrainedParameters, levels: Sequence[Level], intra_node: DeviceMesh | None
) -> str:
    """Describes what a replicated optimizer exchanges, in one line per level of replication. Works
    before the first step, too.

    Each line states the mean bytes that this rank sends per step.
    """
    try:
        parameters = trained.by_name()
    except ValueError:  # not raised here: the first step raises the same error
        return "Replicated, with parameters that are not in the model"
    lines = [
        f"Replicated, {sum(local(p).numel() for p in parameters.values()):,} parameters on this"
        " rank"
    ]
    dense = dense_bytes_by_level(parameters, levels, intra_node)
    on_device = any(decides_on_device(local(p).device) for p in parameters.values())
    for (axis, scheme), full in zip(levels, dense, strict=True):
        lines.append(f"  {scheme.name}({arguments_text(scheme)}) over {axis.size()} replicas: ")
        sent = 0.0
        ways = []
        for part, n in (
            split_by_sharding(parameters, intra_node) if scheme.signal != "nothing" else []
        ):
            layout = scheme.codec.layout({name: tuple(local(p).shape) for name, p in part.items()})
            sent += mean_bytes(scheme.aligned(n) if on_device else scheme, layout, axis.size(), n)
            ways += [
                _WAYS[collective_for(scheme, each, axis.size(), n)]
                for each in scheme.divide(layout)
            ]
        if full:
            share = f", {sent / full:.2%} of full synchronisation"
        else:
            share = ""
        lines[-1] += (
            f"{sent:,.0f} bytes per step by {' and '.join(dict.fromkeys(ways))}{share}"
            if ways
            else "nothing"
        )
    return "\n".join(lines)


_WAYS = {"all-reduce": "all-reduce", "all-gather": "all-gather", "owner": "the owners of rows"}
