"""A flood of connections to the ports of ranks: strangers' connections take no descriptor, and the world goes on."""

import os
import resource
import socket
import stat
import struct
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

import detonation as dt
from detonation.cluster.processes import descriptors
from detonation.cluster.processes.descriptors import GlooPorts, drop_strangers, few_open_files
from detonation.cluster.survive.groups import Group
from detonation.core.link.communicator import _group_beside
from limits import LIMIT_S, until
from worlds import run_alone

SPARE = 100
"""Descriptors that a rank may open beyond those that it has."""
ESTABLISHED = 1  # of the states of TCP
GET_FILTER = 26  # of Linux


def descriptors_here():
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def is_socket(number):
    with suppress(OSError):  # the one that listed the others
        return stat.S_ISSOCK(os.fstat(number).st_mode)


def ports_of_gloo(filtered=False):
    """The addresses at which this process listens through sockets that a program which it starts would inherit:
    those of Python and of TCPStore are none of them. filtered: those alone whose packets the kernel filters."""
    found = set()
    for number in filter(is_socket, descriptors_here()):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as held:
            internet = held.family in (socket.AF_INET, socket.AF_INET6)
            listens = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            gloo = internet and listens and os.get_inheritable(number)
            if gloo and (not filtered or held.getsockopt(socket.SOL_SOCKET, GET_FILTER, 64)):
                found.add((held.family, *held.getsockname()[:2]))
    return found


def hears(family, *address):
    """Whether somebody who connects to a port of this machine comes through. The kernel answers before it returns."""
    with socket.socket(family) as stranger:
        stranger.setblocking(False)
        stranger.connect_ex(address)
        return stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED


INHERITED = set()
"""Ports of the process that forked the ranks, whose groups are of no rank."""


@pytest.fixture(autouse=True)
def inherited(monkeypatch):
    monkeypatch.setitem(globals(), "INHERITED", ports_of_gloo())


def all_filtered():
    return ports_of_gloo() - INHERITED == ports_of_gloo(filtered=True) - INHERITED


def flood(mesh):
    """Rank 1 floods the ports of rank 0, which may open few files; both train on, and make another group."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], dt.demo(chunk=8)
    )

    def steps():
        for _ in range(3):
            model(torch.randn(2, 8, generator=generator)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    came, seen = 0, set()
    few = len(descriptors_here()) + SPARE
    for _ in range(2):
        steps()
        until(all_filtered, "a rank looks for new groups now and then, but not")
        new = [None, None]
        dist.all_gather_object(new, ports_of_gloo() - seen - INHERITED)
        of_rank_0, _ = new
        assert of_rank_0, "a group without a port"
        seen |= new[dist.get_rank()]
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        else:
            came += sum(hears(*port) for port in of_rank_0 for _ in range(2 * few))
        steps()
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
    optimizer.synchronize()
    return came, model.weight.tolist(), few - len(descriptors_here())


def test_a_flood_takes_no_descriptor_and_a_new_group_can_be_made(monkeypatch):
    monkeypatch.setattr("detonation.cluster.init.WAIT_LINE_S", 2.0)
    (_, first, spare), (came, second, _) = run_alone(flood, 2, 1)
    assert came == 0 and spare > 0
    assert first == second


def groups_of_all_kinds(mesh):
    """A connection to a store that is far away takes long, and stops this process meanwhile."""
    store = distributed_c10d._get_default_store().clone()
    ports = GlooPorts(store)
    ranks = [dist.get_rank() // 2 * 2 + other for other in range(2)]
    local = dist.new_group(ranks, use_local_synchronization=True)
    for group in (local, dist.group.WORLD):
        _group_beside(_group_beside(group))

    def connects(store):
        raise AssertionError("a new connection to the store")

    distributed_c10d.PrefixStore.clone = connects
    ports.drop_strangers()
    return all_filtered()


def test_groups_of_all_kinds_become_deaf_without_a_new_connection_to_the_store():
    assert run_alone(groups_of_all_kinds, 4, 1) == [True] * 4


def connect_and_close(mesh):
    """Makes groups, in each of which every rank closes its port at once: others may still connect to each other."""
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    sums = []
    for number in range(10):
        own = dist.PrefixStore(f"group{number}", store)
        group = ProcessGroupGloo(own, rank, 4, timedelta(seconds=LIMIT_S))
        drop_strangers(group, own)
        ones = torch.ones(1)
        group.allreduce([ones]).wait()
        sums.append(int(ones))
    return sums


def test_nobody_needs_the_port_of_a_rank_whose_constructor_has_returned():
    assert run_alone(connect_and_close, 4, 1) == [[4] * 10] * 4


@pytest.fixture
def made():
    """Makes a group of gloo of one rank, `Group` or torch's; returns it, its store, and its port."""

    def make(kind=ProcessGroupGloo, *arguments):
        before, store = ports_of_gloo(), dist.HashStore()
        group = kind(store, 0, 1, *arguments)
        (port,) = ports_of_gloo() - before
        return group, store, port

    return make


def gloo(made):
    return made(ProcessGroupGloo, timedelta(seconds=LIMIT_S))


@pytest.mark.parametrize("address", ["", "127.0.0.1", "::1"])
def test_an_elastic_group_is_deaf_as_soon_as_it_is_connected(made, address):
    if address == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    group, _, port = made(Group, LIMIT_S, address)
    assert not hears(*port)
    group.abandon()


def _has_ipv6():
    with socket.socket(socket.AF_INET6) as held:
        try:
            held.bind(("::1", 0))
        except OSError:
            return False
    return True


def test_only_the_group_itself_becomes_deaf(made):
    (group, store, mine), (other, _, its) = gloo(made), gloo(made)
    assert hears(*mine) and hears(*its)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        daemon = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        opened = descriptors_here()
        drop_strangers(group, store)
        assert descriptors_here() == opened
        assert not hears(*mine) and hears(*its)
        assert hears(socket.AF_INET, *server.getsockname())
        assert hears(socket.AF_INET, "127.0.0.1", daemon.port)
    group.barrier().wait()
    assert other.size() == 1


@pytest.mark.parametrize("inherits", [False, True])
def test_a_default_timeout_of_python_changes_no_socket_of_the_process(made, inherits):
    group, store, port = gloo(made)
    one, other = socket.socketpair()
    with one, other:
        one.set_inheritable(inherits)
        socket.setdefaulttimeout(LIMIT_S)
        try:
            drop_strangers(group, store)
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(one.fileno()) and not hears(*port)


def test_a_connection_is_not_touched_which_gloo_may_change_meanwhile(made, monkeypatch):
    """gloo's threads connect without Python's lock. A connection that blocks stops all exchanges of its group."""
    group, store, port = gloo(made)
    one, other = socket.socketpair()
    with one, other:
        one.set_inheritable(True)
        make = socket.socket
        connection = os.fstat(one.fileno()).st_ino
        touched = []

        def meanwhile(*arguments, fileno=None, **named):
            if fileno is not None and os.fstat(fileno).st_ino == connection:
                touched.append(fileno)
            return make(*arguments, fileno=fileno, **named)

        monkeypatch.setattr(descriptors.socket, "socket", meanwhile)
        drop_strangers(group, store)
        monkeypatch.undo()
        assert not touched and not hears(*port)


def test_an_entry_that_names_a_socket_of_python_makes_nothing_deaf(made):
    group, store, port = gloo(made)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        host, number = server.getsockname()
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", number)
        address += socket.inet_aton(host) + bytes(120)
        name = struct.pack("=q", 3) + b"you" + struct.pack("=q", len(address))
        for forged in (name + address, b"", b"\xff" * 300, name, bytes(300)):
            store.set("0/0", forged)
            drop_strangers(group, store)
            assert hears(socket.AF_INET, host, number) and hears(*port), forged


@pytest.mark.parametrize("why", ["lazy", "no filter", "no entry", "another system"])
def test_a_port_that_may_not_become_deaf_hears_on(made, monkeypatch, why):
    group, store, port = gloo(made)

    def refuse(held):
        raise PermissionError(1, "seccomp")

    if why == "lazy":
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    elif why == "no filter":
        monkeypatch.setattr(descriptors, "_drop_all", refuse)
    elif why == "no entry":
        store.delete_key("0/0")
    else:
        monkeypatch.setattr("sys.platform", "darwin")
    drop_strangers(group, store)
    assert hears(*port)


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("soft", [1024, 4096])
def test_few_files_are_a_warning_only_where_strangers_come_through(monkeypatch, filters, soft):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    if not filters:
        monkeypatch.setattr("sys.platform", "darwin")
    assert bool(few_open_files()) == (soft == 1024 and not filters)
