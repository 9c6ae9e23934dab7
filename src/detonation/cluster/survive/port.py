"""A port of each process, whose kernel tells the others whether they reach it, and at once that it
has ended."""

import contextlib
import os
import socket

from torch.distributed.distributed_c10d import PrefixStore, Store

from detonation.cluster.position import addresses_of, is_loopback
from detonation.cluster.processes.rendezvous import GLOO_INTERFACE

KNOCK_S = 0.2
"""How long a kernel may take to answer. One that does not says nothing."""


class Port:
    """A listening port. Its kernel answers for as long as the process lives, however busy.

    It listens where the messages between replicas arrive: on gloo's interface, else on the way to
    the store.

    name: "HOST PORT" for the others; empty where the store is not reached over a network.
    """

    def __init__(self, store: Store) -> None:
        self.name = ""
        self._listener: socket.socket | None = None
        os.register_at_fork(
            after_in_child=self.close
        )  # workers of a data loader outlive a killed process
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        with contextlib.suppress(OSError):
            host, port = getattr(store, "host", ""), getattr(store, "port", 0)
            family, *_, towards = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(
                family, socket.SOCK_DGRAM
            ) as way:  # sends nothing, but has the address of this host
                way.connect(towards)
                here = _of_messages(way.getsockname()[0])
            family = socket.AF_INET6 if ":" in here else socket.AF_INET
            self._listener = socket.create_server((here, 0), family=family)
            self._listener.setblocking(False)
            self.name = f"{here} {self._listener.getsockname()[1]}"

    def answer(self) -> None:
        """Lets go of those who knocked."""
        with contextlib.suppress(OSError):
            while self._listener:
                self._listener.accept()[0].close()

    def close(self) -> None:
        """Refuses from now on."""
        if self._listener:
            self._listener.close()


def _of_messages(towards_store: str) -> str:
    """The address of gloo's interface, unless that is loopback and the store is on another
    machine."""
    own = addresses_of(os.environ.get(GLOO_INTERFACE, ""))[:1]
    elsewhere = [each for each in own if is_loopback(each) <= is_loopback(towards_store)]
    return next(iter(elsewhere), towards_store)


def knock(name: str, patience_s: float = KNOCK_S) -> bool | None:
    """True where a process has the port `name`, False where its host refuses; None where nobody
    says."""
    host, _, port = name.partition(" ")
    if not port:
        return None
    try:
        socket.create_connection((host, int(port)), timeout=patience_s).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def refuses(name: str) -> bool:
    """True where no process has the port `name` any more; False where one has it, or nobody
    says."""
    return knock(name) is False
