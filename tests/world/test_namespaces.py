"""Network namespaces: real links, counted by the kernel, and gone afterwards however the process ends."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from benchmarks.lab import NoNamespaces, namespace_cluster, require_namespaces

import detonation as dt
from detonation.cluster.launch import run_local
from detonation.cluster.processes.failure import WorldError
from detonation.core.link.link import Link
from detonation.link_speed import LinkSpeed

QUICK = str(Path(__file__).parents[2] / "recipes" / "quick-lm.toml")
SPEED = LinkSpeed.parse("100mbit")


@pytest.fixture(scope="module")
def possible():
    """Skips the test where this machine or user cannot make namespaces."""
    try:
        with namespace_cluster(1, SPEED):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.fixture
def two_nodes(possible):
    """Two nodes that end with the test."""
    with namespace_cluster(2, SPEED) as cluster:
        yield cluster
    assert not left(os.getpid())


def left(pid):
    """The namespaces that process `pid` has left behind."""
    return [path.name for path in Path("/run/netns").glob(f"detonation-{pid}-*")]


def exchange(cluster):
    """Exchanges of three kinds between two nodes of two ranks: the counts of this rank's link, and of its kernel."""
    mesh = dt.init_mesh(2, 2, "cpu")
    link = Link(mesh["replicate"])
    before = cluster.counters(link.replica)
    torch.distributed.barrier()  # a peer must not begin before this rank has looked
    for size in (100_000, 300_000):
        link.all_gather(torch.ones(size, dtype=torch.uint8))()
        link.all_reduce(torch.ones(size // 4))()
        link.all_to_all(torch.ones(2, size, dtype=torch.uint8))()
    torch.distributed.barrier()
    counted = cluster.counters(link.replica).since(before)
    return (
        link.replica,
        link.bytes_sent,
        counted.sent_data_bytes,
        counted.sent_bytes,
        counted.received_bytes,
    )


def test_kernel_and_link_count_the_same_bytes(two_nodes):
    """All messages cross the interface, none twice: within 5 %, barriers included; within 10 % with all headers."""
    found = run_local(exchange, 4, [two_nodes], enter=lambda rank: two_nodes.enter(rank // 2))
    assert [replica for replica, *_ in found] == [0, 0, 1, 1]
    for node in (0, 1):
        counted = sum(sent for replica, sent, *_ in found if replica == node)
        data, frames, received = next(row[2:] for row in found if row[0] == node)
        assert counted == 2 * 3 * 400_000
        assert abs(data / counted - 1) < 0.05
        assert data < frames < 1.1 * counted and received > data


def test_a_node_reaches_others_over_its_link_alone_at_the_requested_rate(two_nodes):
    shown = subprocess.run(
        two_nodes.command(0, ["ip", "-j", "-4", "address"]),
        capture_output=True,
        text=True,
        check=True,
    )
    addresses = {
        link["ifname"]: [a["local"] for a in link["addr_info"]] for link in json.loads(shown.stdout)
    }
    assert addresses == {"lo": ["127.0.0.1"], "eth0": [two_nodes.address(0)]}
    for place, device in ((two_nodes.names[1], "eth0"), (two_nodes.switch, "port1")):
        ruled = subprocess.run(
            ["tc", "-n", place, "-j", "qdisc"], capture_output=True, text=True, check=True
        )
        (rule,) = [rule for rule in json.loads(ruled.stdout) if rule["dev"] == device]
        assert rule["kind"] == "tbf" and rule["options"]["rate"] == 100_000_000 // 8


@pytest.mark.usefixtures("possible")
def test_a_rank_that_fails_leaves_nothing_behind(tmp_path):
    def fail(cluster):
        (tmp_path / str(asleep(cluster))).touch()
        raise ValueError("no")

    with pytest.raises(WorldError, match="no"), namespace_cluster(2, SPEED) as cluster:
        run_local(fail, 2, [cluster], enter=cluster.enter)
    assert not left(os.getpid())
    assert [path for path in tmp_path.iterdir() if alive(path.name)] == []


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_it_ends_nothing_stays(number):
    """A process that was killed cannot remove its namespaces: the next use does."""
    receiver, sender = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for handled in (
                signal.SIGTERM,
                signal.SIGHUP,
            ):  # also where the tests run under nohup or in the background
                signal.signal(handled, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with namespace_cluster(2, SPEED) as cluster:
                os.write(sender, f"{asleep(cluster)}\n".encode())
                signal.pause()
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        sleeper = int(pipe.readline())
    assert len(left(pid)) == 3
    os.kill(pid, number)
    os.waitpid(pid, 0)
    if number == signal.SIGKILL:
        assert len(left(pid)) == 3
        with namespace_cluster(1, SPEED):
            pass
    assert not left(pid)
    assert not alive(sleeper)


@pytest.mark.usefixtures("possible")
def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with namespace_cluster(1, SPEED):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not left(os.getpid())


def asleep(cluster):
    """Starts a process that sleeps in the second node; returns its pid once it runs there."""
    command = cluster.command(1, ["sh", "-c", "echo here; exec sleep 1000"])
    sleeper = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert sleeper.stdout.readline() == b"here\n"
    return sleeper.pid


def alive(pid):
    """True while `pid` runs `sleep`: a killed process may stay in the table for a while, without a command."""
    try:
        return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("link", "uid", "tools", "reason"),
    [
        ("100mbit", 1000, "", "network namespaces need root"),
        ("100mbit", 0, "", "ip and tc not found (Debian's package iproute2 has them)"),
        (
            "100mbit,5ms",
            0,
            "ip tc",
            "its links have a rate and no latency to set, and the link is '100mbit,5ms'",
        ),
    ],
)
def test_without_namespaces_one_line_names_the_reason(
    link, uid, tools, reason, tmp_path, monkeypatch
):
    for tool in tools.split():
        (tmp_path / tool).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(NoNamespaces, match=re.escape(f"no namespaces here: {reason}")):
        require_namespaces(LinkSpeed.parse(link))
