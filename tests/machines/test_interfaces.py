"""Where a process listens: on loopback where all share it, else on the interface that leads to the others."""

import json
import os
from datetime import timedelta

import pytest
import torch
from benchmarks.lab import namespace_cluster
from nodes import Network, machines
from torch.distributed import TCPStore

import detonation as dt
from commands import Command
from detonation.cluster.init import LaunchPosition, interface_line, meet
from detonation.cluster.interface import find_way, listening_address
from detonation.cluster.position import joined_address
from detonation.cluster.processes.rendezvous import use_interface
from detonation.feed.frames import Listener

__all__ = ["namespace_cluster"]
"""For conftest: this file makes namespaces."""

PAIR = Network({"a": "10.9.0.1/24", "b": "10.9.0.2/24"}, "wire", names={"other": "b"})
SIX = Network({"a": "fd09::1/64", "b": "fd09::2/64"}, "wire")
NET = pytest.mark.parametrize("network", [PAIR, SIX], ids=["IPv4", "IPv6"])


@pytest.fixture
def lab(request, tmp_path):
    """The machines of the parameter `network`, or of PAIR."""
    network = getattr(request.node, "callspec", None)
    network = network.params.get("network", PAIR) if network else PAIR
    with machines(network, tmp_path / "disks") as found:
        yield found


def asked(lab, machine, question, *arguments, env=None):
    """A process on `machine` that answers a question; `answers` waits for it."""

    def program(_):
        try:
            answer = question(*arguments)
        except (ValueError, OSError) as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
        os._exit(0)  # without waiting for a peer

    folder = lab.folder / f"{machine}-{len([*lab.folder.iterdir()])}"
    return Command(folder, env=env or {}, program=program, enter=lambda: lab.enter(machine))


def answers(*processes):
    assert [process.wait() for process in processes] == [0] * len(processes)
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


def way(host):
    return str(find_way(host))


@NET
def test_the_kernels_route_decides(lab, network):
    own, other = lab.address("a"), lab.address("b")
    # its own name leads to loopback; without a default route the only interface is left
    hosts = [other, own, "other", "a", "0.0.0.0", "nowhere.example.org"]
    found = answers(*(asked(lab, "a", way, host) for host in hosts))
    assert found == [f"wire ({own})"] * len(hosts)


def add_interface():
    os.system(
        "ip link add spare type bridge && ip addr add 10.8.0.1/24 dev spare && ip link set spare up"
    )


def test_one_error_names_the_host_and_the_interfaces(lab):
    def of_two(host):
        add_interface()
        return way(host)

    found, lost = answers(asked(lab, "a", of_two, "10.9.0.2"), asked(lab, "b", of_two, "b"))
    assert found == "wire (10.9.0.1)"
    assert lost == (
        "ValueError: no interface of this machine leads to 'b', its interfaces are lo "
        "(127.0.0.1), wire (10.9.0.2), spare (10.8.0.1): choose one that the other machines "
        "reach, with --interface or GLOO_SOCKET_IFNAME"
    )


@NET
def test_a_listener_under_a_machines_own_name_is_reached_by_others(lab, network):
    names = ["a", "localhost", "127.0.0.1", lab.address("a")]
    found = answers(*(asked(lab, "a", listening_address, name) for name in names))
    own = lab.address("a")
    assert found == [own, "127.0.0.1", "127.0.0.1", own]
    token = b"0123456789abcdef"
    (port,) = answers(asked(lab, "a", lambda: Listener("a:0", token, print).port))
    assert port > 0


def world(rank, size, address, interface=""):
    """Where this rank of a world of torchrun listens, and what a sum over all ranks gives."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT="29500")
    use_interface(os.environ, interface)
    position = LaunchPosition(rank, size, 0, 1)
    store, _ = meet(position)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    total = torch.tensor(rank + 1)
    torch.distributed.all_reduce(total)
    return [os.environ["GLOO_SOCKET_IFNAME"], int(total), interface_line()]


@NET
def test_the_ranks_of_two_machines_listen_towards_the_first(lab, network):
    address = lab.address("a")
    found = answers(*(asked(lab, name, world, rank, 2, address) for rank, name in enumerate("ab")))
    where = joined_address(address, 29500)
    line = f"listening on wire ({address}), wire ({lab.address('b')}), towards {where}"
    assert found == [["wire", 3, line]] * 2


def test_the_ranks_of_one_machine_share_loopback(lab):
    """Also where no launcher says that they are on one machine."""
    found = answers(*(asked(lab, "a", world, rank, 2, "10.9.0.1") for rank in range(2)))
    assert found == [["lo", 3, ""]] * 2


def test_loopback_is_refused_on_all_ranks_where_others_are_elsewhere(lab):
    found = answers(
        asked(lab, "a", world, 0, 2, "10.9.0.1"),
        asked(lab, "b", world, 1, 2, "10.9.0.1", "lo"),
    )
    assert (
        found
        == [
            "ValueError: rank 1 has no route to ranks on other machines: GLOO_SOCKET_IFNAME is 'lo': "
            "set it to an interface that the other machines reach, or unset it"
        ]
        * 2
    )


def along_an_axis(replica, replicas, host, port, keeps=False):
    """Where this replica, a world of its own on loopback, listens, and what a sum over replicas gives."""
    store = TCPStore(
        host, port, is_master=keeps, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    axis = dt.elastic(replica=replica, replicas=replicas, store=store)
    total = axis.all_reduce(torch.tensor([replica + 1.0]))()
    found = [axis.listening, total.item(), str(axis.way_to(1 - replica))]
    axis.close()  # both leave together, because one of them keeps the store
    return found


INSIDE = {"GLOO_SOCKET_IFNAME": "lo"}
"""What a world on one machine leaves in the environment."""


@NET
def test_the_replicas_of_an_axis_listen_towards_the_store(lab, network):
    host = lab.address("b")
    found = answers(
        asked(
            lab,
            "b",
            along_an_axis,
            0,
            2,
            "0.0.0.0" if network is PAIR else host,
            29400,
            True,
            env=INSIDE,
        ),
        asked(lab, "a", along_an_axis, 1, 2, host, 29400, env=INSIDE),
    )
    own = f"wire ({lab.address('a')})"
    where = joined_address(host, 29400)
    assert found[1] == [f"replica 1 is listening on {own}, towards {where}", 3.0, own]
    assert found[0][1:] == [3.0, f"wire ({host})"]


def test_the_replicas_of_one_machine_listen_on_loopback(lab):
    found = answers(
        asked(lab, "a", along_an_axis, 0, 2, "10.9.0.1", 29400, True),
        asked(lab, "a", along_an_axis, 1, 2, "10.9.0.1", 29400),
    )
    assert found == [["", 3.0, "lo (127.0.0.1)"]] * 2
