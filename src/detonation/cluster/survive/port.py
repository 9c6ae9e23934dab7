"""A port of each process, whose kernel tells the others at once that the process has ended."""

import contextlib
import os
import socket

from torch.distributed.distributed_c10d import PrefixStore, Store

KNOCK_S = 0.2
"""How long a kernel may take to answer. One that does not says nothing."""


class Port:
    """A listening port on the way to the store. Its kernel answers for as long as the process
    lives, however busy.

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
                here = way.getsockname()[0]
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


def refuses(name: str) -> bool:
    """True where no process has the port `name` any more; False where one has it, or nobody says."""
    host, _, port = name.partition(" ")
    try:
        if port:
            socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
