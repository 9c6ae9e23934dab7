"""Partitions between namespaces: who goes on, and with which words the others end
(benchmarks/faults/partitions.py)."""

import pytest
from benchmarks.faults import partitions
from benchmarks.lab import NoNamespaces, namespace_cluster

from detonation.cluster.survive import partition


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    """Nobody waits half a minute here; the figures of docs/reliability.md have the real times."""
    try:
        with namespace_cluster(1, partitions.FAST):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))
    monkeypatch.setattr(partition, "WAIT_LINE_S", 4.0)
    monkeypatch.setattr(partition, "KNOCK_PATIENCE_S", 1.0)
    monkeypatch.setattr(partitions, "_SETTINGS", (*partitions._SETTINGS, "peers.silence_s=8"))


@pytest.mark.parametrize(
    "name, goes_on, line",
    [
        ("0 cannot send to 1, for ever", [0, 2], "replica 1 and replica 0 cannot reach each other"),
        ("1 cut off from the store, for ever", [0, 2], "rank 1 has lost the store"),
    ],
    ids=["one way", "store"],
)
def test_one_side_goes_on_and_the_other_ends_with_its_reason(name, goes_on, line):
    (scenario,) = (each for each in partitions.SCENARIOS if each.name == name)
    outcome = partitions.measured(scenario)
    assert outcome.goes_on == goes_on and outcome.stepped_s is not None
    (ending,) = outcome.ends.values()
    assert ending.code == 1 and line in ending.line
