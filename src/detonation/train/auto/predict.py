"""The seconds that a simulated step would take on a cluster that was measured with fewer replicas."""

from dataclasses import replace
from pathlib import Path

import detonation as dt
from detonation.cluster.network.profile import Profile
from detonation.core.link.link_speed import hops
from detonation.core.schemes.traffic import Kind
from detonation.plan.cost import Cost, Network, Work, cost
from detonation.train.recipe.schema import Config
from detonation.train.recipe.sizes import shard_shapes
from detonation.train.run.run import Request, configure

RINGS: tuple[Kind, ...] = ("all-reduce", "all-gather")


def predict(config: Config, recipe: Path, path: Path) -> Cost:
    """What one step of `config` costs by the profile at `path`, which was measured with `recipe` as it stands.

    Forward and backward are taken to be in proportion to the batch. Raises `ValueError` where the profile cannot say:
    of another recipe, without compute, of more than one shard or of a single replica.
    """
    profile = Profile.read(path)
    compute = profile.compute
    if compute is None or compute.recipe != recipe.stem:
        of = "no recipe" if compute is None else f"the recipe {compute.recipe}"
        raise ValueError(f"{path} is of {of}: measure with detonation probe {recipe} --shards 1")
    if profile.shards != 1 or profile.replicas < 2:
        world = f"{profile.replicas} replicas x {profile.shards} shards"
        raise ValueError(f"{path} was measured with {world}, but a simulated replica has one shard: probe with 2 x 1")
    measured = configure(Request(recipe), None).train
    examples = config.train.batch_size * config.train.accumulate / (measured.batch_size * measured.accumulate)
    seconds = compute.forward_backward_s * examples
    work = Work(shard_shapes(config), seconds, compute.steps, overlap=not config.train.clip)
    scheme = dt.scheme(config.scheme.name, config.scheme.arguments)
    return cost(scheme, work, among(Network.of_profile(profile), config.mesh.replicas))


def among(network: Network, replicas: int) -> Network:
    """The same wires joining `replicas` nodes: a ring has more messages in a row, and its latency grows with them."""
    operations = dict(network.operations)  # an all-to-all sends to all at once
    for kind in RINGS:
        chain = hops(kind, replicas) / hops(kind, network.replicas)
        operations[kind] = replace(operations[kind], latency_s=chain * operations[kind].latency_s)
    return Network(replicas, network.shards, operations)
