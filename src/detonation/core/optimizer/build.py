"""Builds the replicators of each level of replication, and compares settings and weights of the
replicas before their first message.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.core.agreement import (
    CLOSE,
    NORM_SELFTEST,
    STEP_SELFTEST,
    TESTS,
    Clip,
    Safety,
    StopConsensus,
    norm_selftest,
    options_of,
    selftest,
    selftest_conditions,
)
from detonation.core.compute.checksum import checksum
from detonation.core.flat.tensors import (
    Piece,
    digest,
    largest_local_shape,
    local,
    padding_row,
    whole_numel,
)
from detonation.core.integrity.fault_counts import NEW_PARAMETER, OPTIONS, FaultCounts
from detonation.core.link import (
    SAME_START,
    Axis,
    Coordinates,
    Level,
    Link,
    Mismatch,
    divided,
    first_text,
    links_of_shards,
    mismatch_on_all,
    rules_of,
    split_by_sharding,
)
from detonation.core.optim import BaseStep
from detonation.core.optimizer.gathered import late_parameters, local_parameters
from detonation.core.optimizer.setup_checks import (
    warn_of_others,
    warn_of_rounding,
    warn_of_second_momentum,
)
from detonation.core.replicator import (
    Channel,
    GradientReplicator,
    HoldingReplicator,
    ParameterReplicator,
    Replicator,
)
from detonation.core.round import LocalSteps
from detonation.core.runtime import Runtime, fp32_products
from detonation.core.schemes import GradientScheme, ParameterScheme, Scheme, require_below_dense
from detonation.plugins import plugin
from detonation.version import __version__

Route = tuple[Link, FaultCounts]
"""The link of a level of replication, and the fault counts of this link. A level has two routes if
the ranks of a node shard some parameters and hold the remaining parameters whole.
"""


_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Settings:
    """The arguments of `replicate` that all levels of replication share.

    products: how fp32 matrix products are rounded outside of steps. Inside a step, the inputs of
    products are never rounded to TF32 or bf16 (`Runtime.exact_arithmetic`).
    """

    intra_node: DeviceMesh | None
    seed: int
    kernels: bool
    safety: Safety
    clip: float | None
    balance: bool = False
    products: str = field(default_factory=fp32_products)


def build_levels(
    parameters: Mapping[str, Tensor],
    model: nn.Module,
    base: BaseStep,
    levels: Sequence[Level],
    settings: Settings,
    routes: dict[tuple[int, int], Route],
) -> tuple[list[list[Replicator]], StopConsensus]:
    """Builds the replicators of each level of replication over the local shards of `parameters`. A
    level has one replicator for each fragment of the model, or none if its scheme exchanges
    nothing.

    With `intra_node` a level may have two sets of replicators: one set for parameters sharded over
    the node's ranks, and one set for parameters that each rank holds whole.

    Raises `LargerThanDense` if a scheme would send more than full synchronisation.

    Args:
        model: The model of `parameters`.
        routes: The existing links and fault counts, by level and number of local ranks. Missing
            entries are added.
    """
    device = _device_of(parameters)
    local_steps = None
    if settings.balance:
        local_steps = LocalSteps(levels[0][1].round, levels[0][0].size())
    stops = settings.safety.non_finite == "stop"
    runtime = Runtime(device, settings.seed, settings.kernels, local_steps, stops)
    consensus = StopConsensus(parameters, runtime, settings.safety, base.optimizer)
    consensus.look = partial(warn_of_second_momentum, base.optimizer, levels, since=True)
    consensus.look()
    others = [name for name in local_parameters(model) if name not in parameters]
    faults = [*parameters, *others, *options_of(base.optimizer, {}), OPTIONS, NEW_PARAMETER]
    for _, counts in routes.values():
        consensus.counts.append(counts)
        counts.names = faults
    late = late_parameters(model)
    builder = _Builder(base, levels, settings, routes, runtime, consensus, faults, late)
    made = [builder.level(index, parameters) for index in range(len(levels))]
    base.clip = None
    if settings.clip:
        parts = rules_of(levels[0][0]).norms(parameters)
        base.clip = Clip(parameters, base.optimizer, settings.clip, parts)
    consensus.connect(levels, [each for level in made for each in level])
    if local_steps is not None:
        balance = plugin("gates", "balance")
        link, _ = routes[0, 1]
        consensus.gates.append(balance(local_steps, link, consensus.shards, device))
    return made, consensus


def _device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    """Returns the common device of `parameters`. Raises `ValueError` if there are no parameters,
    several devices, or a dtype that cannot be replicated.
    """
    if not parameters:
        raise ValueError(
            "no parameter of the optimizer requires a gradient: set requires_grad=True on at"
            " least one parameter"
        )
    devices = {local(parameter).device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(
            f"the trained parameters are on {len(devices)} devices {sorted(map(str, devices))}:"
            " move the model to one device"
        )
    for name, parameter in parameters.items():
        if parameter.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {parameter.dtype}: updates are computed in fp32, so trained"
                " parameters must be fp32, bf16 or fp64 (compute in fp16 under torch.autocast)"
            )
    return devices.pop()


@dataclass
class _Builder:
    """Builds the replicators of all levels, one level after the other.

    routes: see `build_levels`. faults: parameter names for fault counts. late: see
    `late_parameters`. channels: for each part of the parameters, the count of channels built so
    far, which is the index of the next channel.
    """

    base: BaseStep
    levels: Sequence[Level]
    settings: Settings
    routes: dict[tuple[int, int], Route]
    runtime: Runtime
    consensus: StopConsensus
    faults: list[str]
    late: frozenset[str]
    channels: Counter[int] = field(default_factory=Counter)

    def level(self, index: int, parameters: Mapping[str, Tensor]) -> list[Replicator]:
        """Builds the replicators of the level of replication at `index` in `levels`."""
        axis, scheme = self.levels[index]
        made: list[Replicator] = []
        for part, on, group, local_ranks in _ways(
            axis, scheme, parameters, self.settings.intra_node
        ):
            link, counts = self._route(index, part, on, local_ranks)
            largest = scheme.codec.layout(
                {name: largest_local_shape(p) for name, p in group.items()}
            )
            # all shards check the size of the largest shard, so that all raise the same error
            require_below_dense(scheme, largest, link.replicas, link.local_ranks)
            made += self._fragments(index, part, group, link, counts)
        return made

    def _route(self, index: int, part: int, on: Axis, local_ranks: int) -> Route:
        """Returns the link and the fault counts for one part of the parameters in level `index`.
        The first call for a part creates them.
        """
        key = index, part + local_ranks
        if key not in self.routes:
            inside = [axis for axis, _ in self.levels[:index]]
            if local_ranks > 1:
                node = self.settings.intra_node
            else:
                node = None
            link = Link(on, node, own=True, inside=inside)
            gradients = self.levels[index][1].signal == "gradients"
            self.routes[key] = link, self.consensus.add_level(self.faults, link, gradients, index)
        return self.routes[key]

    def _fragments(
        self,
        index: int,
        part: int,
        group: Mapping[str, Tensor],
        link: Link,
        counts: FaultCounts,
    ) -> Iterator[Replicator]:
        """Yields one replicator for each fragment into which the scheme of level `index` divides
        the parameters `group`.
        """
        scheme = self.levels[index][1]
        last = all(later.signal != "gradients" for _, later in self.levels[index + 1 :])
        whole = scheme.codec.layout({name: local(p).shape for name, p in group.items()})
        sizes = {name: whole_numel(p) for name, p in group.items()}
        for fragment, layout in enumerate(scheme.divide(whole, sizes)):
            mine = {slot.name: group[slot.name] for slot in layout.slots}
            number = self.channels[part]
            late = self.late & mine.keys()
            channel = Channel(scheme, layout, link, self.runtime, counts, number, late)
            yield replicator_of(mine, channel, self.base, fragment, last)
            self.channels[part] += 1


def _ways(
    axis: Axis, scheme: Scheme, parameters: Mapping[str, Tensor], intra_node: DeviceMesh | None
) -> Iterator[tuple[int, Axis, dict[str, Tensor], int]]:
    """Divides `parameters` into groups. The parameters of a group are exchanged together. First
    `divided` makes parts of the parameters, then `split_by_sharding` divides each part into groups.

    Yields for each group: the index and the axis of its part, the parameters of the group, and the
    number of ranks in each node that send the same message.
    """
    for part, on, mine in divided(axis, parameters) if scheme.signal != "nothing" else []:
        for group, local_ranks in split_by_sharding(mine, intra_node):
            yield part, on, group, local_ranks


def replicator_of(
    parameters: Mapping[str, Tensor], channel: Channel, base: BaseStep, fragment: int, last: bool
) -> Replicator:
    """Builds the replicator of one fragment of the model, `parameters`, at one level of
    replication.

    fragment: index of the fragment (see `Scheme.fragments`). last: True if no level after this
    level exchanges gradients.
    """
    scheme = channel.scheme
    # True if an update may be nonzero although all signals (gradients or movements) are zeros
    leaks = not scheme.codec.keeps_zeros or channel.exchange.secluded
    held = leaks and any(padding_row(parameter) is not None for parameter in parameters.values())
    if isinstance(scheme, GradientScheme):
        # SignSGD holds whole parameters, so it cannot move pieces of parameters by signs
        last = last and not any(isinstance(each, Piece) for each in parameters.values())
        base.hold(parameters.values() if leaks else ())
        made: Replicator = GradientReplicator(parameters, channel, base, last)
    else:
        assert isinstance(scheme, ParameterScheme)
        kind = ParameterReplicator
        if held:
            kind = HoldingReplicator
        made = kind(parameters, channel, scheme, scheme.rounds[fragment])
    made.holds_padding = held
    return made


def compare_replicas(
    replicators: Sequence[Replicator],
    settings: Settings,
    optimizer: Optimizer,
    joining: Collection[str] | None = None,
    others: Mapping[str, Tensor] | None = None,
    begun: bool = False,
    close: bool = False,
    again: bool = False,
) -> str:
    """Compares the settings and weights that must be equal on all replicas. If a setting or weight
    differs, raises `Mismatch` on all replicas. Collective.

    Args:
        optimizer: The base optimizer, for the options of its parameter groups.
        joining: Names of the parameters whose weights are compared. None compares all weights, and
            the self-tests, too.
        others: Weights that no replicated optimizer trains; they are compared, too. If such a
            weight differs and requires a gradient, a warning replaces the error, because another
            optimizer may train the weight.
        begun: Whether steps were taken. Weights may then differ if replicas round differently.
        close: Whether this replica already knows that replicas round differently.
        again: Whether a comparison found that replicas round differently, so that each operation
            of a step is now rounded singly.

    Returns: how replicas round differently, in words that are the same on all ranks; empty if they
    round alike.
    """
    if not replicators:
        return ""
    bits = settings.safety.equal == "bits"
    comparison = _FirstComparison(
        settings,
        optimizer,
        joining,
        others,
        begun,
        close,
        replicators[0].channel.runtime.device,
    )
    if not bits:
        comparison.free = TESTS
    elif not again:
        comparison.free = (STEP_SELFTEST,)
    parameters = [
        parameter for replicator in replicators for parameter in replicator.parameters.values()
    ]
    shards = links_of_shards(parameters)
    with mismatch_on_all(shards, comparison.device):
        comparison.run(replicators)
    differ = comparison.take_others()
    if replicators[0].link.replica == 0:
        warn_of_others(differ)
    links = dict.fromkeys(replicator.link for replicator in replicators)
    # With one link and no shards, all ranks took part in one comparison, and know its result.
    if shards or len(links) > 1:
        further = [*shards, *links]
    else:
        further = []
    tests = [text for key, text in comparison.found.items() if key in TESTS]
    rounded = first_text(further, "; ".join(tests), comparison.device)
    if not begun:
        return rounded
    weights = [text for key, text in comparison.found.items() if key not in TESTS]
    apart = first_text(further, "; ".join(weights[:3]), comparison.device)
    if not apart or rounded or close:
        return rounded
    if again and not bits:
        return apart
    raise Mismatch(
        f'replicas differ: {apart}. {SAME_START}; or pass Safety(equal="close") to go on'
    )


def compare_rounding_singly(
    base: BaseStep, found: str, compare: Callable[..., str], here: Coordinates
) -> str:
    """Switches on separate rounding of each operation in steps, and compares the replicas again. If
    all replicas then round alike, separate rounding stays on. Collective.

    Args:
        found: How replicas round differently without separate rounding.
        compare: Compares the replicas; see `compare_replicas`.

    Returns: how replicas still round differently; empty if they round alike.
    """
    rounded_singly = base.rounds_singly
    base.round_singly()
    still = compare(again=True)
    base.round_singly(not still)
    if not (still or rounded_singly):
        warn_of_rounding(found, here, closely=False)
    return still


_PLAIN = " (not in this optimizer)"
"""Suffix of the name of a weight that requires a gradient, but that this optimizer does not train.
Replicas may differ in such weights, because another optimizer may train them.
"""
_FROZEN = " (frozen weights)"
_SHARD = " (shard)"
_SHARDS = _SHARD + _FROZEN, _SHARD + _PLAIN
"""Endings of the names of weights that are sharded over the ranks of a node."""


@dataclass
class _FirstComparison:
    """Compares settings and weights of replicas along one link after the other.

    `compare_replicas` describes the first arguments.

    device: device of the trained parameters. free: names of the self-tests whose results may differ
    between replicas. found: the allowed differences that were found; the keys are the names of
    self-tests and weights, and the values describe the difference as text. tested: by scheme, its
    self-test results. If the scheme cuts the model into fragments, all fragments share these
    results. compared: the links along which replicas have already been compared.
    """

    settings: Settings
    optimizer: Optimizer
    joining: Collection[str] | None
    others: Mapping[str, Tensor] | None
    begun: bool
    close: bool
    device: torch.device
    free: tuple[str, ...] = ()
    found: dict[str, str] = field(default_factory=dict)
    tested: dict[Scheme, dict[str, str]] = field(default_factory=dict)
    compared: set[Link] = field(default_factory=set)

    def run(self, replicators: Sequence[Replicator]) -> None:
        """Compares the replicas for each of `replicators`, and finally raises the first `Mismatch`
        that was found. Collective.

        The error is raised only at the end, because other ranks wait for the later comparisons.
        """
        refused: list[Mismatch] = []
        for replicator in replicators:
            description = self._describe(replicator)
            self.compared.add(replicator.link)
            engine = replicator.channel.engine.name
            conditions = f"{selftest_conditions(self.device)}, engine={engine}"
            notes = dict.fromkeys(TESTS, conditions)
            free = (*self.free, _PLAIN)
            if self.begun:
                free += ("weights)",)
            try:
                self.found |= replicator.link.require_same(
                    description, self.device, notes, free=free, shards=_SHARDS
                )
            except Mismatch as error:
                refused.append(error)
        if refused:
            raise refused[0]

    def _describe(self, replicator: Replicator) -> dict[str, str]:
        """Returns the settings, self-test results and weights of `replicator` that must be equal on
        all replicas; see `_description`."""
        scheme = replicator.scheme
        description = _description(replicator, self.settings, self.joining)
        description |= options_of(self.optimizer, replicator.parameters)
        description[CLOSE] = str(self.close)
        if self.joining is None:
            if not self.tested.get(scheme):
                runtime = replicator.channel.runtime
                self.tested[scheme] = selftest(scheme, runtime, replicator.stepped)
            description |= self.tested[scheme]
        if self.settings.balance:
            description["balance"] = "True"
        if self.settings.clip:
            description["clip"] = str(self.settings.clip)
            description[NORM_SELFTEST] = norm_selftest(self.device)
        if self.others and replicator.link not in self.compared:
            description |= self._describe_others(replicator)
        return description

    def _describe_others(self, replicator: Replicator) -> dict[str, str]:
        """Returns the checksums of the weights that this optimizer does not train. The keys tell
        which of these weights are frozen, and which are sharded over the ranks of a node.
        """
        sums = self._checksums(replicator.part_of(self.others or {}))
        keys = {}
        for part, local_ranks in split_by_sharding(self.others or {}, self.settings.intra_node):
            cut = ""
            if self.settings.intra_node is not None and local_ranks == 1:
                cut = _SHARD
            for name, parameter in part.items():
                kind = _FROZEN
                if parameter.requires_grad:
                    kind = _PLAIN
                keys[name] = name + cut + kind
        return {keys[name]: checksum_text for name, checksum_text in sums.items()}

    def _checksums(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns a checksum of each weight, as text. The host reads all checksums in one copy from
        the device.
        """
        if not weights:
            return {}
        sums = torch.stack([checksum(tensor).to(self.device) for tensor in weights.values()])
        return {name: str(one) for name, one in zip(weights, sums.tolist(), strict=True)}

    def take_others(self) -> list[str]:
        """Removes some weights from the allowed differences: those that require a gradient, but
        that this optimizer does not train. Returns their names.
        """
        odd = [key for key in self.found if key.endswith(_PLAIN)]
        for key in odd:
            del self.found[key]
        return [key.removesuffix(_PLAIN).removesuffix(_SHARD) for key in odd]


def _description(
    replicator: Replicator, chosen: Settings, joining: Collection[str] | None
) -> dict[str, str]:
    """Returns all settings and weights that must be equal on all replicas. Each key is the name
    that an error message shows.
    """
    scheme = replicator.scheme
    channel = replicator.channel
    settings = {"detonation": __version__, "torch": torch.__version__, "byte order": sys.byteorder}
    settings |= {"scheme": scheme.name, "seed": str(channel.runtime.seed)}
    # Checks on a device stop a run a step later than on a host, so all replicas must check alike.
    settings["decisions on the device"] = str(channel.runtime.decides_on_device)
    settings["products of fp32 matrices"] = chosen.products
    # the number of buckets in `overlap` depends on which gradients arrive at the end of backward
    if channel.late:
        settings["gradients at the end of backward"] = ", ".join(sorted(channel.late))
    settings |= {
        name: str(value) for name, value in (asdict(chosen.safety) | dict(scheme.arguments)).items()
    }
    for slot, tensor in zip(replicator.layout.slots, replicator.shared_weights(), strict=True):
        settings[f"{slot.name} (shape)"] = f"{slot.shape} {replicator.parameters[slot.name].dtype}"
        if joining is None or slot.name in joining:
            settings[f"{slot.name} (weights)"] = digest([tensor])[:16]
    return settings
