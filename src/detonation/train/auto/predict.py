"""The seconds of a simulated step on a cluster that was measured with fewer replicas."""

from dataclasses import replace
from math import prod
from pathlib import Path

from detonation.cluster.network.profile import Profile
from detonation.core.link.link_speed import hops
from detonation.core.schemes.traffic import CollectiveKind
from detonation.plan.cost import Cost, Network, Work, cost
from detonation.train.loop.session import scheme_of
from detonation.train.recipe.resolve import read_layers
from detonation.train.recipe.schema import Config, TrainConfig
from detonation.train.recipe.sizes import shard_shapes

RINGS: tuple[CollectiveKind, ...] = ("all-reduce", "all-gather")


def predict(config: Config, recipe: Path, path: Path) -> Cost:
    """The cost of one step of `config` by the profile at `path`, which was measured with `recipe`.

    Forward and backward are assumed to be in proportion to the batch.

    Raises:
        ValueError: The profile is of another recipe or model, of none, of more than one shard, or of a single replica.
    """
    profile = Profile.read(path)
    compute = profile.compute
    if compute is None or compute.recipe != recipe.stem:
        of = "no recipe" if compute is None else f"the recipe {compute.recipe}"
        raise ValueError(f"{path} is of {of}: measure with detonation probe {recipe} --shards 1")
    if profile.shards != 1 or profile.replicas < 2:
        world = f"{profile.replicas} replicas x {profile.shards} shards"
        raise ValueError(f"{path} was measured with {world}, but a simulated replica has one shard: probe with 2 x 1")
    shapes = shard_shapes(config)
    parameters = sum(map(prod, shapes[0].values()))
    if parameters != compute.parameters:
        was = f"{path} is of {compute.parameters:,} parameters, and this model has {parameters:,}"
        raise ValueError(f"{was}: measure with detonation probe {recipe} --shards 1, and the same --set")
    # a profile that does not say is of the recipe as it stands
    measured = compute.examples or _examples(read_layers(recipe, (), mesh={}).config().train)
    seconds = compute.forward_backward_s * _examples(config.train) / measured
    work = Work(shapes, seconds, compute.steps, accumulate=config.train.accumulate)
    return cost(scheme_of(config.levels[-1]), work, among(Network.of_profile(profile), config.mesh.replicas))


def _examples(train: TrainConfig) -> int:
    """Examples per rank and step."""
    return train.batch_size * train.accumulate


def among(network: Network, replicas: int) -> Network:
    """The same links between `replicas` nodes: the latency of a ring grows with its messages in a row."""
    operations = dict(network.operations)  # an all-to-all sends to all at once
    for kind in RINGS:
        chain = hops(kind, replicas) / hops(kind, network.replicas)
        operations[kind] = replace(operations[kind], latency_s=chain * operations[kind].latency_s)
    return Network(replicas, network.shards, operations)
