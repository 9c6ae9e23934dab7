"""From levels to replicators, and the comparison of replicas before their first message."""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.core.agreement.clipping import Clip
from detonation.core.agreement.consensus import StopConsensus
from detonation.core.agreement.desync import options_of
from detonation.core.agreement.safety import Safety
from detonation.core.agreement.selftest import (
    CLOSE,
    NORM_SELFTEST,
    STEP_SELFTEST,
    TESTS,
    norm_selftest,
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
from detonation.core.link.communicator import Axis, divided
from detonation.core.link.handshake import SAME_START, Mismatch
from detonation.core.link.hierarchical import split_by_sharding
from detonation.core.link.link import Link, first_text, links_of_shards, mismatch_on_all
from detonation.core.optim.base_step import BaseStep
from detonation.core.optimizer.setup_checks import warn_of_second_momentum
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.replicator.parameter import HoldingReplicator, ParameterReplicator
from detonation.core.round import LocalSteps
from detonation.core.runtime import Runtime, fp32_products
from detonation.core.schemes.scheme import GradientScheme, ParameterScheme, Scheme
from detonation.core.schemes.traffic import require_below_dense
from detonation.version import __version__

Level = tuple[Axis, Scheme]
Route = tuple[Link, FaultCounts]
"""The link of a level, and the counts of its faults: there are two where a node's ranks hold some
parameters whole."""


_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Settings:
    """The choices of `replicate` that all levels share.

    products: how the caller's matrix products in fp32 round; a step's own are exact
    (`Runtime.exact_arithmetic`).
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
    names: Sequence[str],
    base: BaseStep,
    levels: Sequence[Level],
    settings: Settings,
    routes: dict[tuple[int, int], Route],
) -> tuple[list[list[Replicator]], StopConsensus]:
    """The replicators of each level over the local shards of `parameters`: one, or one per
    fragment, or none.

    With `intra_node` there may be two of each: for parameters that are sharded over the ranks of a
    node, and for parameters that each rank holds whole.

    Raises `LargerThanDense` where a scheme would send more than full synchronisation.

    Args:
        names: Of all parameters of the model.
        routes: By level and number of local ranks; those that are missing are added.
    """
    if not parameters:
        raise ValueError(
            "no parameter of the optimizer requires a gradient: at least one must, to be replicated"
        )
    devices = {local(parameter).device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(
            f"the trained parameters are on {len(devices)} devices {sorted(map(str, devices))},"
            " must be 1"
        )
    for name, parameter in parameters.items():
        if parameter.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {parameter.dtype}: updates go through fp32 and back, so trained"
                " parameters must be fp32, bf16 or fp64 (compute in fp16 under torch.autocast)"
            )
    local_steps = (
        LocalSteps(levels[0][1].round.every, levels[0][0].size()) if settings.balance else None
    )
    runtime = Runtime(devices.pop(), settings.seed, settings.kernels, local_steps)
    consensus = StopConsensus(parameters, runtime, settings.safety, base.optimizer)
    consensus.look = partial(warn_of_second_momentum, base.optimizer, levels, since=True)
    consensus.look()
    made: list[list[Replicator]] = []
    places = Counter[int]()  # by part: the replicators so far
    others = [name for name in names if name not in parameters]
    faults = [*parameters, *others, *options_of(base.optimizer), OPTIONS, NEW_PARAMETER]
    for _, counts in routes.values():
        consensus.counts.append(counts)
        counts.names = faults
    for number, (axis, scheme) in enumerate(levels, 1):
        made.append([])
        last = all(later.signal != "gradients" for _, later in levels[number:])
        for part, on, group, local_ranks in _ways(axis, scheme, parameters, settings.intra_node):
            key = number - 1, part + local_ranks
            if key not in routes:
                inside = [axis for axis, _ in levels[: number - 1]]
                link = Link(
                    on, settings.intra_node if local_ranks > 1 else None, own=True, inside=inside
                )
                routes[key] = (
                    link,
                    consensus.add_level(faults, link, scheme.signal == "gradients", number - 1),
                )
            link, counts = routes[key]
            largest = scheme.codec.layout(
                {name: largest_local_shape(p) for name, p in group.items()}
            )
            require_below_dense(
                scheme, largest, link.replicas, link.local_ranks
            )  # alike on all shards
            whole = scheme.codec.layout({name: local(p).shape for name, p in group.items()})
            sizes = {name: whole_numel(p) for name, p in group.items()}
            for fragment, layout in enumerate(scheme.divide(whole, sizes)):
                mine = {slot.name: group[slot.name] for slot in layout.slots}
                channel = Channel(scheme, layout, link, runtime, counts, places[part])
                made[-1].append(replicator_of(mine, channel, base, fragment, last))
                places[part] += 1
    norms = getattr(levels[0][0], "norms", None)  # of an axis that divides parameters
    parts = norms(parameters) if norms and settings.clip else None
    base.clip = Clip(parameters, base.optimizer, settings.clip, parts) if settings.clip else None
    consensus.connect(levels, [each for level in made for each in level])
    if settings.balance:
        consensus.balance_over(routes[0, 1][0])
    return made, consensus


def _ways(
    axis: Axis, scheme: Scheme, parameters: Mapping[str, Tensor], intra_node: DeviceMesh | None
) -> Iterator[tuple[int, Axis, dict[str, Tensor], int]]:
    """The parameters that replicate together: the number of the part, its axis, and
    `split_by_sharding` of it."""
    for part, on, mine in divided(axis, parameters) if scheme.signal != "nothing" else []:
        for group, local_ranks in split_by_sharding(mine, intra_node):
            yield part, on, group, local_ranks


def replicator_of(
    parameters: Mapping[str, Tensor], channel: Channel, base: BaseStep, fragment: int, last: bool
) -> Replicator:
    """The replicator of one fragment of a level. last: whether no later level exchanges gradients."""
    scheme, leaks = (
        channel.scheme,
        not channel.scheme.codec.keeps_zeros or channel.exchange.secluded,
    )
    held = leaks and any(padding_row(parameter) is not None for parameter in parameters.values())
    if isinstance(scheme, GradientScheme):
        last = last and not any(
            isinstance(each, Piece) for each in parameters.values()
        )  # no optimizer knows pieces
        base.hold(parameters.values() if leaks else ())
        made: Replicator = GradientReplicator(parameters, channel, base, scheme, last)
    else:
        assert isinstance(scheme, ParameterScheme)
        kind = HoldingReplicator if held else ParameterReplicator
        made = kind(parameters, channel, scheme, scheme.rounds[fragment])
    made.holds_padding = held
    return made


def compare_replicas(
    replicators: Sequence[Replicator],
    settings: Settings,
    optimizer: Optimizer,
    joining: Collection[str] | None = None,
    frozen: Mapping[str, Tensor] | None = None,
    begun: bool = False,
    close: bool = False,
    again: bool = False,
) -> str:
    """Raises `Mismatch` on all replicas where one differs in a setting that must be the same.
    Collective.

    Args:
        optimizer: The base optimizer, for the options of its parameter groups.
        joining: The parameters whose weights are compared, where the rest was compared before.
        frozen: Weights that no step moves, which are compared too.
        begun: Whether steps were taken, so that weights may differ where replicas round
            differently.
        close: Whether this replica knows that they do.
        again: Whether they found before that they do, and now round steps singly.

    Returns: how they round differently, in words that are the same on all ranks; empty where they
    round alike.
    """
    if not replicators:
        return ""
    bits = settings.safety.equal == "bits"
    free = TESTS if not bits else () if again else (STEP_SELFTEST,)
    tested: dict[Scheme, dict[str, str]] = {}  # fragments of one decode alike
    found: dict[str, str] = {}
    refused, compared = list[Mismatch](), set[Link]()
    parameters = [
        parameter for replicator in replicators for parameter in replicator.parameters.values()
    ]
    shards, device = links_of_shards(parameters), replicators[0].channel.runtime.device
    with mismatch_on_all(shards, device):
        for replicator in replicators:
            scheme, runtime = replicator.scheme, replicator.channel.runtime
            description = (
                _description(replicator, settings, joining)
                | options_of(optimizer)
                | {CLOSE: str(close)}
            )
            if joining is None:
                tested[scheme] = tested.get(scheme) or selftest(scheme, runtime, replicator.stepped)
                description |= tested[scheme]
            if settings.balance:
                description |= {"balance": "True"}
            if settings.clip:
                description |= {"clip": str(settings.clip), NORM_SELFTEST: norm_selftest(device)}
            if frozen and replicator.link not in compared and (mine := replicator.part_of(frozen)):
                sums = torch.stack(
                    [checksum(tensor).to(device) for tensor in mine.values()]
                ).tolist()
                description |= {
                    f"{name} (frozen weights)": str(one)
                    for name, one in zip(mine, sums, strict=True)
                }
            compared.add(replicator.link)
            notes = dict.fromkeys(
                TESTS, f"{selftest_conditions(device)}, engine={replicator.channel.engine.name}"
            )
            weights = [name for name in description if begun and name.endswith("weights)")]
            try:
                found |= replicator.link.require_same(
                    description, device, notes, free=(*free, *weights)
                )
            except (
                Mismatch
            ) as error:  # raised below: other ranks wait for the rest of the comparisons
                refused.append(error)
        if refused:
            raise refused[0]
    links = dict.fromkeys(replicator.link for replicator in replicators)
    others = (
        [*shards, *links] if shards or len(links) > 1 else []
    )  # alone, the link has told all ranks
    rounding, weights = (
        [text for key, text in found.items() if (key in TESTS) == tests] for tests in (True, False)
    )
    rounded = first_text(others, "; ".join(rounding), device)
    if (
        begun
        and (apart := first_text(others, "; ".join(weights[:3]), device))
        and not (rounded or close)
    ):
        if again and not bits:
            return apart
        raise Mismatch(
            f'replicas differ: {apart}. {SAME_START}; or go on with Safety(equal="close")'
        )
    return rounded


def _description(
    replicator: Replicator, chosen: Settings, joining: Collection[str] | None
) -> dict[str, str]:
    """All settings that must be the same, by their names in an error."""
    scheme, channel = replicator.scheme, replicator.channel
    settings = {"detonation": __version__, "torch": torch.__version__, "byte order": sys.byteorder}
    settings |= {"scheme": scheme.name, "seed": str(channel.runtime.seed)}
    settings["decisions on the device"] = str(
        channel.runtime.decides_on_device
    )  # which stop a step later
    settings["products of fp32 matrices"] = chosen.products
    settings |= {
        name: str(value) for name, value in (asdict(chosen.safety) | dict(scheme.arguments)).items()
    }
    for slot, tensor in zip(replicator.layout.slots, replicator.shared_weights(), strict=True):
        settings[f"{slot.name} (shape)"] = f"{slot.shape} {replicator.parameters[slot.name].dtype}"
        if joining is None or slot.name in joining:
            settings[f"{slot.name} (weights)"] = digest([tensor])[:16]
    return settings
