"""Reads the rank and the world size that a launcher assigned to this process, and parses HOST:PORT
addresses.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from detonation.cluster.interface import is_loopback

_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # variables that MPICH and Intel MPI set
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class LaunchPosition:
    """Position of a process: rank `rank` of `world_size` ranks, which is rank `local_rank` of the
    `local_world_size` ranks on its machine.

    local_rank, local_world_size: None if the launcher does not set them. nodes: number of
    torchrun's nodes; None with other launchers. address, port: where the ranks meet, if the
    launcher does not set MASTER_ADDR and MASTER_PORT.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: str = ""
    port: int = 0
    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            last = self.world_size - 1
            raise ValueError(
                f"the launcher says rank {self.rank}, but ranks are from 0 to {last}: correct RANK"
            )

    @property
    def one_machine(self) -> bool:
        """True if all ranks are certainly on this machine."""
        return self.local_world_size == self.world_size


def launch_position(env: Mapping[str, str]) -> LaunchPosition | None:
    """Reads the position that torchrun, a Kubernetes job, mpirun or srun assigned to this process.
    Returns None if there is no launcher.

    Raises `ValueError` if a variable of the launcher is not a whole number.

    >>> env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    >>> launch_position(env).local_world_size
    4
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return _named(env, names, meeting_here=is_loopback(env.get("MASTER_ADDR", "")))
    # MPI comes first: mpirun starts daemons by srun, and its ranks inherit SLURM's variables
    for names in _MPI:
        if names[0] in env and names[3] in env:
            return _named(env, names)
    if _srun_started(env):
        return _slurm(env)
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        return _named(env, _MPI[-1])
    return None


def first_host(hosts: str) -> str:
    """Returns the first host name in SLURM's compressed list of hosts.

    >>> first_host("gpu[007-009,012],login1"), first_host("a,b"), first_host("rack2-[3,5]-ib")
    ('gpu007', 'a', 'rack2-3-ib')
    """
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", hosts)
    if match:
        return "".join(part or "" for part in match.groups())
    return ""


def _named(
    env: Mapping[str, str], names: tuple[str, str, str, str], meeting_here: bool = False
) -> LaunchPosition:
    """Reads a position from four environment variables, of which the last two may be missing.
    `meeting_here` is True if the store of the ranks is on this machine.
    """
    rank, world = (_number(env, name) for name in names[:2])
    local_rank, local_world = (_number_if_set(env, name) for name in names[2:])
    if local_world is None and (meeting_here or world == 1):
        local_world = world
    if local_rank is None and local_world is not None and world % local_world == 0:
        local_rank = rank % local_world
    nodes = _number_if_set(env, "GROUP_WORLD_SIZE")
    return LaunchPosition(rank, world, local_rank, local_world, nodes=nodes)


_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Lowest number of the SLURM steps that srun did not start: interactive, batch and extern steps."""


def _srun_started(env: Mapping[str, str]) -> bool:
    """True if srun started this process as a task that computes.

    False in the shell of salloc, of `srun --pty` or of a batch script. The environment of such a
    shell has the task count of the whole job, although the shell is only one process.
    """
    if "SLURM_PROCID" not in env or not _SLURM_COUNTS & env.keys():
        return False
    if _number(env, "SLURM_STEP_ID", _FIRST_RESERVED_STEP) >= _FIRST_RESERVED_STEP:
        return False
    return "SLURM_PTY_PORT" not in env or _slurm_tasks(env) > 1


_SLURM_COUNTS = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}


def _slurm_tasks(env: Mapping[str, str]) -> int:
    """Returns the number of tasks of this SLURM step. In a shell, SLURM_NTASKS is the task count of
    the job; under srun, SLURM_NTASKS is the task count of the SLURM step.
    """
    tasks = _number_if_set(env, "SLURM_STEP_NUM_TASKS")
    if tasks is None:
        return _number(env, "SLURM_NTASKS")
    return tasks


def _slurm(env: Mapping[str, str]) -> LaunchPosition:
    rank = _number(env, "SLURM_PROCID")
    world = _slurm_tasks(env)
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    return LaunchPosition(
        rank,
        world,
        _number_if_set(env, "SLURM_LOCALID"),
        _tasks_here(env, world),
        address=first_host(hosts) or env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        port=20_000 + _number(env, "SLURM_JOB_ID", 0) % 20_000,
    )


def _tasks_here(env: Mapping[str, str], world: int) -> int | None:
    """Returns the number of tasks of this SLURM step on this node; None if SLURM's variables do not
    give the number. One of these variables lists the tasks of all nodes, such as "8(x2),4".
    """
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    per_node = [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]
    node = _number(env, "SLURM_NODEID", 0)
    if node < len(per_node):
        return per_node[node]
    if env.get("SLURM_NTASKS_PER_NODE", "").isdigit():
        return min(world, int(env["SLURM_NTASKS_PER_NODE"]))
    nodes = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", ""))
    if nodes == "1":
        return world
    return None


def _number_if_set(env: Mapping[str, str], name: str) -> int | None:
    if name in env:
        return _number(env, name)
    return None


def _number(env: Mapping[str, str], name: str, default: int | str = "") -> int:
    text = env.get(name, str(default))
    if not text.isdigit():
        raise ValueError(
            f"the launcher's environment has {name}={text!r}: set {name} to a whole number"
        )
    return int(text)


def require_known_host(flag: str, addresses: str) -> None:
    """Raises `ValueError` if this machine cannot resolve a host in `addresses`, or if a host names
    all interfaces. `flag` is the option in which the user gave these addresses of stores.
    """
    for host, port in store_addresses(addresses):
        named = joined_address(host, port)
        if host in ("0.0.0.0", "::"):
            raise ValueError(
                f"{flag} is {named!r}, which names all interfaces: give the address of one"
                " interface that the other machines reach"
            )
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise ValueError(
                f"{flag} is {named!r}, but no host has that name: give the name or"
                " address of a host"
            ) from error


def host_and_port(address: str) -> tuple[str, int]:
    """Splits "HOST:PORT" into host and port. An IPv6 address is in brackets.

    Raises:
        ValueError: The address has another form.

    Example:
        >>> host_and_port("10.10.0.1:7000"), host_and_port("[::1]:7000")
        (('10.10.0.1', 7000), ('::1', 7000))
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"the address is {address!r}, must be HOST:PORT such as 127.0.0.1:7000")
    return host, int(port)


def store_addresses(text: str) -> list[tuple[str, int]]:
    """Splits one "HOST:PORT", or several that are separated by commas, into hosts and ports.

    Raises `ValueError` if an address has another form or is repeated, or if the number of addresses
    is even.

    >>> store_addresses("a:7000,b:7000,c:7000")
    [('a', 7000), ('b', 7000), ('c', 7000)]
    """
    found = [host_and_port(each.strip()) for each in text.split(",")]
    if len({*found}) < len(found):
        raise ValueError(f"the stores are {text!r}, but must be different: give each address once")
    if len(found) % 2 == 0:
        raise ValueError(
            f"the stores are {text!r}, but their number must be odd: leave one out, because"
            f" {len(found)} stores survive no more losses than {len(found) - 1}"
        )
    return found


def joined_address(host: str, port: int | str) -> str:
    """Joins host and port to one text, from which `host_and_port` reads them again.

    >>> joined_address("10.10.0.1", 7000), joined_address("::1", 7000)
    ('10.10.0.1:7000', '[::1]:7000')
    """
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"
