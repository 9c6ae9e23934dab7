"""Settings that every test needs before torch starts threads, and what tests of commands share."""

import fcntl
import gc
import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
if (
    os.environ.get("TEST_DEVICE", "cpu") == "cpu"
):  # on a GPU, interpreted kernels would read its addresses on the host
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read where triton is imported: kernels run on the CPU
if "TEST_DEVICE" not in os.environ:
    os.environ.setdefault(
        "CUDA_VISIBLE_DEVICES", ""
    )  # the tests train on the CPU, on a machine with GPUs too

import pytest
import torch
from benchmarks import lab
from torch.distributed.tensor import _op_schema, _sharding_prop

from detonation.cluster.processes import heartbeat
from detonation.cluster.survive import groups, membership, surviving
from detonation.core.agreement import self_tests as selftest
from detonation.feed import frames
from limits import LIMIT_S

torch.set_num_threads(1)
# torch takes a traceback for each operation that is new to DTensor, and Python would look on the disk each time whether
# one of its files has changed: an eighth of the CPU time of tests with worlds.
linecache.checkcache = lambda filename=None: None

# For each operation and shape that is new to a process, DTensor asks for the result's shape in a FakeTensorMode of its
# own, a millisecond each: a third of the CPU time of short trainings in fresh processes. The meta device knows it, too.
_sharding_prop.FakeTensorMode = nullcontext  # type: ignore[assignment,misc]
_op_schema._rebuild_tensor_from_dtensor_meta = lambda spec: torch.empty_strided(
    spec.tensor_meta.shape, spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device="meta"
)

# Every optimizer decodes a test vector of 262,144 numbers before its first step; models of tests have a hundredth.
# Interpreters that play other processors (unlike.py) have the whole vector.
selftest._SHAPE = (64, 64)

# The same examples in every run: a test that fails for somebody fails for everybody. `make test-all` has more of them;
# look for new ones with `pytest --hypothesis-profile=search`.
with suppress(
    ImportError
):  # where `make gpu` runs some of the tests, there may be torch and pytest alone
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=15)
    settings.register_profile("long", derandomize=True, deadline=None, max_examples=100)
    settings.register_profile("search", deadline=None, max_examples=500)
    settings.load_profile("repeatable")


collect_ignore = ["package/outside"]
"""A package that only its tests install: to look for doctests in it would register its scheme for
all tests."""


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("long_cases"):
        if item.callspec.id in mark.args:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """What was imported is no garbage: no collection looks through it again, here or in a fork."""
    gc.collect()
    gc.freeze()


_made: list[membership.Membership | surviving.SurvivingCommunicator | frames.Subscription] = []


def _note_each(kind: type) -> None:
    """Notes each object of this class that is made from now on."""
    begin = kind.__init__  # type: ignore[misc]

    def begin_and_note(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        _made.append(self)

    kind.__init__ = begin_and_note  # type: ignore[misc]


_note_each(membership.Membership)
_note_each(surviving.SurvivingCommunicator)
_note_each(frames.Subscription)


@pytest.fixture(autouse=True)
def threads_end_with_their_test() -> Iterator[None]:
    """Otherwise they beat, look for losses and log lines about followers as long as other tests run."""
    _made.clear()
    yield
    for made in _made:
        if isinstance(made, surviving.SurvivingCommunicator):
            with made._changed:
                made._closed = True
                made._changed.notify_all()
        elif isinstance(made, frames.Subscription):
            made._hang_up()
        else:
            made._stopped.set()
    for made in _made:
        if isinstance(made, membership.Membership):
            made.stop()
    _made.clear()


@pytest.fixture(scope="module", autouse=True)
def one_maker_of_namespaces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Files that make network namespaces run one at a time: whoever makes some removes those of dead processes."""
    names = vars(getattr(request.node, "obj", None) or object).values()
    if not any(getattr(each, "__module__", None) == lab.__name__ for each in names):
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "namespaces.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)  # forks hold it, too


@pytest.fixture(scope="module")
def lasting_worlds() -> Iterator[None]:
    """The tests of all such files share a world of each shape (`worlds.lasting`)."""
    import worlds  # not for tests without one: it imports half of torch

    with worlds.lasting(keep=True):
        yield


@pytest.fixture(scope="module")
def own_worlds() -> Iterator[None]:
    """The tests of a file share a world of each shape, where other libraries may leave something behind."""
    import worlds

    with worlds.lasting():
        yield


@pytest.fixture(scope="session", autouse=True)
def worlds_end() -> Iterator[None]:
    yield
    if found := sys.modules.get("worlds"):
        found.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a sign of a rank waits less, in the commands too, which are forks; the gate has the real times."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.15)
    monkeypatch.setattr(heartbeat, "_READING_S", 1.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica is lost because this machine is slow: all, also in forks, hear of each end."""
    for module, name in ((membership, "CONFIRM_S"), (membership, "ARRIVE_S"), (groups, "FORM_S")):
        monkeypatch.setattr(module, name, LIMIT_S)
