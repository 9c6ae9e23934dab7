"""What is wrong on one machine of several ends all of them, and each says why."""

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
from benchmarks.lab import namespace_cluster
from lab import Page, Run
from nodes import Network, machines
from test_lab import SLURM, TUNNEL

from commands import write_recipe

__all__ = ["namespace_cluster"]
"""For conftest: this file makes namespaces."""

NETWORK = Network({**TUNNEL, "store": "10.10.0.3/24"}, names={"a": "a", "b": "b"})
TORCHRUN = (
    "torchrun --nnodes 2 --node-rank %d --nproc-per-node 2 --master-addr 10.10.0.1 "
    "--master-port 29500 -m"
)
TRAIN = "detonation train my.toml --out run"
ELASTIC = f"{TRAIN} --elastic --meet 10.10.0.3:29400 --replicas 2 --replica %d"


class Start(NamedTuple):
    """A command line on two machines, how it ends, and who cannot start on machine 0 and 1."""

    line: str
    code: int
    who: tuple[str, str]
    env: Mapping[str, Mapping[str, str]] = MappingProxyType({})


STARTS = {
    "torchrun": Start(f"{TORCHRUN} {TRAIN}", 1, ("rank 0", "rank 2")),
    "SLURM": Start(TRAIN, 2, ("rank 0", "rank 1"), SLURM),
    "elastic": Start(ELASTIC, 2, ("replica 0", "replica 1")),
    "elastic, by torchrun": Start(
        f"torchrun --standalone --nproc-per-node 2 -m {ELASTIC} --shards 2",
        1,
        ("replica 0", "replica 1"),
    ),
}


@pytest.fixture
def both(tmp_path):
    """Runs a start on both machines, and a store on a third; returns what the machines said."""
    with contextlib.ExitStack() as stack:
        up = stack.enter_context(machines(NETWORK, tmp_path))

        def bring(start, recipes):
            run = Run("", Page(NETWORK, env=start.env), up)
            stack.callback(run.close)
            run.start("store", "detonation meet 10.10.0.3:29400", "the store")
            for machine, recipe in zip("ab", recipes, strict=True):
                if recipe is not None:
                    write_recipe(run.disk(machine) / "my.toml", **recipe)
            lines = [start.line.replace("%d", str(number)) for number in range(2)]
            commands = [run.start(*each, each[1]) for each in zip("ab", lines, strict=True)]
            assert [command.wait() for command in commands] == [start.code] * 2
            said = [command.stderr for command in commands]
            assert start.code == 2 or all("exitcode  : 2 " in text for text in said), said
            return said

        yield bring


@pytest.mark.long_cases("elastic, by torchrun-the first", "torchrun-the first")
@pytest.mark.parametrize("faulty", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_recipe_that_one_machine_lacks(both, start, faulty):
    recipes = [{}, {}]
    recipes[faulty] = None
    said = both(start, recipes)
    reason = "cannot read the recipe 'my.toml'"
    assert said[faulty].count(f"\nerror: {reason}") == 1
    assert said[1 - faulty].count(f"\nerror: {start.who[faulty]} did not start: {reason}") == 1


@pytest.mark.long_cases("elastic, by torchrun")
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_recipe_that_differs_on_one_machine(both, start):
    said = both(start, [{}, {"seed": 7}])
    for text in said:
        (line,) = (line for line in text.splitlines() if line.startswith("error: "))
        assert "seed is " in line and "7" in line, said
