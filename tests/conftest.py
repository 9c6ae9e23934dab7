"""Settings that every test needs before torch starts threads, and what tests of commands share."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
import torch
from hypothesis import settings

from detonation.cluster.processes import heartbeat, heartbeat_board

torch.set_num_threads(1)

# The same examples in every run: a test that fails for somebody fails for everybody. Look for new ones with
# `pytest --hypothesis-profile=search`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What was imported is no garbage: no collection looks through it again, here or in a fork."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a sign of a rank waits less, in the commands too, which are forks; the gate has the real times."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.15)
    monkeypatch.setattr(heartbeat_board, "_READING_S", 1.0)
