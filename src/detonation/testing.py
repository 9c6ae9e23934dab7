"""Test helpers: `check_scheme` checks in one process whether a scheme, built-in or your own, obeys
the laws of docs/design.md.

This module needs only torch, so its helpers run in any test suite. No module of the package imports
this module.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.codec import Mean, aggregate
from detonation.core.flat.layout import Layout
from detonation.core.flat.tensors import digest
from detonation.core.link import Communicator
from detonation.core.memory import Feedback, Memory
from detonation.core.optimizer import replicate
from detonation.core.runtime import decides_on_device
from detonation.core.schemes import Scheme, bytes_sent, dense_bytes, ring_bytes
from detonation.core.schemes import scheme as scheme_named

T = TypeVar("T")
_SHAPES = {"matrix": (40, 64), "scalar": (), "prime": (257,), "empty": (0, 3), "cube": (3, 3, 2, 5)}


class LawBroken(AssertionError):
    """A scheme or a communicator breaks a law of docs/design.md or a rule of its interface. The
    message names the law or rule, and what was observed.
    """


def check_scheme(
    scheme: Scheme, replicas: int = 3, steps: int = 4, device: torch.device | str = "cpu"
) -> None:
    """Checks whether `scheme` obeys laws of docs/design.md, with tensors of odd shapes and
    simulated replicas.

    The laws are 1 (nothing is lost), 2 (replicas agree), 3 (everyone is heard), 4 (a message owns
    its storage and its size is known), 5 (never larger than dense), 9 (private state is saved and
    resumes exactly) and 11 (zero is zero: a precision decodes negated values to the negated
    result). For law 10, one parameter of the simulated model gets no gradient.

    Also checks these rules for the parts of a scheme:

    - The name and the arguments of the scheme make an equal scheme.
    - The basis is orthonormal.
    - The indices of a selection rise, unless the selection is shared.
    - Selection and aggregation are pure functions: calls with equal arguments have equal results.

    Cannot detect results that depend on process, rank or time.

    Args:
        scheme: Made by a registered function.
        replicas: Number of simulated replicas, at least 1.
        steps: Number of simulated training steps.
        device: Device of the tensors: "cpu", "cuda" or another accelerator.

    Raises:
        LawBroken: A law does not hold.

    Example:
        >>> import detonation as dt
        >>> check_scheme(dt.demo(topk=4, chunk=16))
    """
    _require(
        scheme_named(scheme.name, scheme.arguments) == scheme,
        "spelling",
        f"the name and arguments of {scheme.name} do not make an equal scheme",
    )
    if scheme.signal == "nothing":
        return
    layout = scheme.codec.layout(_SHAPES)
    device = torch.device(device)
    _basis_is_orthonormal(scheme, layout, device)
    _indices_rise(scheme, layout, device)
    _aggregation_is_pure(scheme, device)
    _nothing_is_lost(scheme, layout, device)
    _everyone_is_heard(scheme, device)
    _messages_own_their_memory(scheme, layout, device)
    _zero_is_zero(scheme, device)
    _replicas_agree(scheme, replicas, steps, device)


_THROUGH = {
    "all-reduce": ("full", {}),
    "all-gather": ("demo", {}),
    "all-to-all": ("demo", {"link": "owner"}),
}
"""For each collective, a scheme whose messages go through this collective."""


def check_axis(ends: Sequence[Communicator], device: torch.device | str = "cpu") -> None:
    """Checks that the communicators of an axis fulfil the interface `Communicator`. Also checks
    that schemes over this axis obey laws 2 (replicas agree), 4 (bytes are known) and 9 (private
    state resumes exactly).

    A separate thread uses the communicator of each replica. As in `check_scheme`, only one replica
    computes at a time between collectives.

    Args:
        ends: The communicators of one axis, one for each replica, in replica order.
        device: Device of the tensors, as in `check_scheme`.

    Raises:
        LawBroken: A collective or a law does not hold.

    Example:
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> check_axis([LoopbackCommunicator()])
    """
    _in_threads(lambda end: _require_collectives(end, torch.device(device)), ends)
    turn = threading.Lock()

    def in_turns(act: Callable[[Communicator], T], replicas: int) -> list[T]:
        def acts(end: Communicator) -> T:
            with turn:
                return act(_InTurns(end, turn))

        return _in_threads(acts, ends)

    for name, arguments in _THROUGH.values():
        scheme = scheme_named(name, arguments)
        _replicas_agree(scheme, len(ends), 4, torch.device(device), in_turns)


class _InTurns(Communicator):
    """Wraps the communicator `end` for a thread that holds the lock `turn`. The wrapper releases
    the lock only during collectives.
    """

    def __init__(self, end: Communicator, turn: threading.Lock) -> None:
        self.replica = end.replica
        self._end = end
        self._turn = turn

    def size(self) -> int:
        return self._end.size()

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return self._collective(lambda: self._end.all_reduce(values))

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._collective(lambda: self._end.all_gather(mine))

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._collective(lambda: self._end.all_to_all(mine))

    def _collective(self, start: Callable[[], Callable[[], Tensor]]) -> Callable[[], Tensor]:
        arriving = self._meanwhile(start)
        return lambda: self._meanwhile(arriving)

    def _meanwhile(self, act: Callable[[], T]) -> T:
        self._turn.release()
        try:
            return act()
        finally:
            self._turn.acquire()


def _in_threads(act: Callable[[Communicator], T], ends: Sequence[Communicator]) -> list[T]:
    """Calls `act` in a separate thread for each of the communicators `ends`, and returns the
    results. Raises the first error.
    """
    done = SimpleQueue[tuple[int, Any, BaseException | None]]()

    def run(number: int) -> None:
        try:
            done.put((number, act(ends[number]), None))
        except BaseException as error:
            done.put((number, None, error))

    for number in range(len(ends)):
        # daemon threads, because after an error in one thread the others may wait forever
        threading.Thread(target=run, args=(number,), daemon=True).start()
    found: dict[int, T] = {}
    for _ in ends:
        number, result, error = done.get()
        if error is not None:
            raise error
        found[number] = result
    return [found[number] for number in range(len(ends))]


def _require_collectives(end: Communicator, device: torch.device) -> None:
    """Starts a collective of every kind, waits for the collectives in reverse order, and checks the
    received values.
    """
    replicas = end.size()
    # whole numbers, so that their sum is exact in any order
    every = [torch.arange(5.0) * (replica + 1) for replica in range(replicas)]
    octets = [torch.arange(3 * replicas) + 16 * replica for replica in range(replicas)]
    rows = torch.stack(octets).to(torch.uint8).to(device)
    total = torch.stack(every).sum(0).to(device)
    summing = end.all_reduce(every[end.replica].to(device))
    gathering = end.all_gather(rows[end.replica].clone())
    dealing = end.all_to_all(rows[end.replica].clone())
    dealt = rows.view(replicas, replicas, 3)[:, end.replica]
    for kind, arrived, expected in (
        ("all_to_all", dealing(), dealt),
        ("all_gather", gathering(), rows),
        ("all_reduce", summing(), total),
    ):
        holds = torch.equal(arrived, expected)
        seen = f"replica {end.replica} got {arrived.tolist()}, expected {expected.tolist()}"
        _require(holds, f"the contract of {kind}", seen)


def _require(holds: bool, law: str, seen: str) -> None:
    if not holds:
        raise LawBroken(f"{law}: {seen}")


def _signals(layout: Layout, seed: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator).to(device) for slot in layout.slots]


def _sent(scheme: Scheme, flat: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Encodes `flat` in one message. Returns the update that this message alone gives, and the
    message.
    """
    codec = scheme.codec
    selected = codec.select(flat, step, 0)
    message = codec.encode(selected)
    indices = None
    if codec.selection.shared:
        indices = selected.indices
    received = codec.received([message], len(flat), indices, Mean())
    return codec.basis.inverse(aggregate(received.whole(), Mean(), codec.selection.chunk)), message


def _basis_is_orthonormal(scheme: Scheme, layout: Layout, device: torch.device) -> None:
    flat = layout.flatten(_signals(layout, 0, device), device)
    coefficients = scheme.codec.basis.forward(flat.clone())
    off = float((scheme.codec.basis.inverse(coefficients.clone()) - flat).norm() / flat.norm())
    grows = float(coefficients.norm() / flat.norm())
    _require(
        off < 1e-3 and abs(grows - 1) < 1e-3,
        "the contract of a basis, an orthonormal transform",
        f"inverse(forward(x)) is off by {off:.2g} of x, and forward makes norms {grows:.3g} times"
        " as large",
    )


def _indices_rise(scheme: Scheme, layout: Layout, device: torch.device) -> None:
    selection = scheme.codec.selection
    if scheme.codec.dense:
        return
    flat = layout.flatten(_signals(layout, 0, device), device)
    first = selection.indices(flat.clone(), 3, 5)
    second = selection.indices(flat.clone(), 3, 5)
    law = "the contract of a selection"
    same = torch.equal(first, second)
    _require(same, law, "two calls of indices with equal arguments return different results")
    rises = bool((first.long().diff(dim=1) > 0).all())
    _require(
        selection.shared or rises,
        law,
        "the indices of a row do not rise, or a row contains an index twice",
    )


def _aggregation_is_pure(scheme: Scheme, device: torch.device) -> None:
    rows, chunk, k = 6, 16, 4
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, rows, k, generator=generator).to(device)
    order = torch.rand(3, rows, chunk, generator=generator).argsort(2)[..., :k].sort(2).values
    indices = order.to(device)
    before = values.clone()

    def aggregated(count: int) -> Tensor:
        # the result may share memory with the values
        return scheme.aggregation(values[:, :count], indices[:, :count], chunk).clone()

    first = aggregated(rows)
    second = aggregated(rows)
    law = "the contract of an aggregation, a pure function"
    _require(torch.equal(values, before), law, "it changes the values that it is given")
    _require(torch.equal(first, second), law, "two calls with equal values differ in their results")
    _require(
        not scheme.aggregation.rowwise or torch.equal(aggregated(rows // 2), first[: rows // 2]),
        law,
        "rowwise is True, but a row of the result depends on other rows of the messages",
    )


def _nothing_is_lost(scheme: Scheme, layout: Layout, device: torch.device) -> None:
    memory = Memory(layout, Feedback(decay=1.0), device)
    sent = layout.zeros(device)
    put_in = layout.zeros(device)
    for step in range(5):
        put_in += layout.flatten(_signals(layout, step, device), device)
        update, _ = _sent(scheme, memory.absorb(_signals(layout, step, device)), step)
        memory.release([update])
        sent += update
    outside = layout.padding(device)
    rest = (memory.residual + sent - put_in).view(-1).index_fill(0, outside, 0.0)
    worst = 0.0
    if rest.numel():
        worst = float(rest.abs().max())
    _require(worst < 1e-3 * 5, "law 1, nothing is lost", f"residual + sent is off by {worst:g}")


def _everyone_is_heard(scheme: Scheme, device: torch.device) -> None:
    selection = scheme.codec.selection
    rows = 7
    if not (selection.shared and selection.period):
        return
    heard = torch.zeros(rows, selection.chunk, device=device)
    for step in range(selection.period):
        indices = selection.indices(heard, step, 0)
        heard.scatter_add_(1, indices, torch.ones(indices.shape, device=device))
    once = bool((heard == 1).all())
    _require(
        once,
        "law 3, everyone is heard",
        f"the selection did not choose every coordinate exactly once in {selection.period} steps",
    )


def _messages_own_their_memory(scheme: Scheme, layout: Layout, device: torch.device) -> None:
    flat = layout.flatten(_signals(layout, 0, device), device)
    _, message = _sent(scheme, flat, 0)
    before = message.clone()
    flat.fill_(float("nan"))
    _require(
        torch.equal(message, before),
        "law 4, a message owns its memory",
        "the message changed when the flat tensor was overwritten",
    )
    nbytes = message.nbytes
    known = scheme.codec.nbytes(layout.rows)
    _require(
        nbytes == known,
        "law 4, a size that is known beforehand",
        f"the message has {nbytes} bytes, but arithmetic gives {known}",
    )


def _zero_is_zero(scheme: Scheme, device: torch.device) -> None:
    precision = scheme.codec.precision
    values = _signals(scheme.codec.layout({"w": (300, 7)}), 0, device)[0]
    values[::2] = 0.0
    read, mirrored = (
        precision.decode(precision.encode(sign * values, negative_zeros=sign < 0), 300, 7)
        for sign in (1.0, -1.0)
    )
    worst = float((read + mirrored).abs().max())
    _require(
        worst == 0,
        "law 11, zero is zero",
        f"negated values and zeros do not decode to the negated result: they are off by {worst:g}",
    )


def _replicas_agree(
    scheme: Scheme,
    replicas: int,
    steps: int,
    device: torch.device,
    run: Callable[..., list[Any]] = simulate_replicas,
) -> None:
    """Trains a small model with several replicas, and checks laws 2, 4, 5 and 9. One parameter of
    the model gets no gradient. `run` calls a function for each replica, and returns the results.
    """

    def act(communicator: Communicator) -> tuple[str, list[int], bool]:
        def made() -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(31, 64), nn.Linear(64, 3))
            model.register_parameter("unused", nn.Parameter(torch.ones(11)))
            model.to(device)
            return model, torch.optim.SGD(model.parameters(), lr=0.01)

        model, base = made()
        optimizer = replicate(base, model, communicator, scheme)
        sent = []
        for step in range(steps):
            before = optimizer.stats.bytes_sent
            generator = torch.Generator().manual_seed(100 * step + communicator.replica)
            examples = torch.randn(4, 31, generator=generator).to(device)
            model(examples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(optimizer.stats.bytes_sent - before)
        state = {key: tensor.clone() for key, tensor in optimizer.local_state().items()}
        twin, twin_base = made()
        twin.load_state_dict(model.state_dict())
        other = replicate(twin_base, twin, communicator, scheme)
        other.load_state_dict(optimizer.state_dict())
        resumed = other.local_state()
        exact = all(torch.equal(tensor, state[key]) for key, tensor in resumed.items())
        optimizer.synchronize()
        return digest(model.parameters()), sent, exact

    outcomes = run(act, replicas)
    _require(
        len({outcome[0] for outcome in outcomes}) == 1,
        "law 2, replicas agree",
        "their weights differ",
    )
    _require(
        all(outcome[2] for outcome in outcomes),
        "law 9, private state is private",
        "the loaded state does not resume exactly",
    )
    model = nn.Sequential(nn.Linear(31, 64), nn.Linear(64, 3))
    shapes = {"unused": (11,)} | {name: tuple(p.shape) for name, p in model.named_parameters()}
    layout = scheme.codec.layout(shapes)
    sends = scheme
    if decides_on_device(device):
        sends = scheme.aligned()
    known = [bytes_sent(sends, layout, replicas, step) for step in range(steps)]
    if scheme.signal == "gradients":
        # One parameter never has a gradient.
        # So with the first messages, replicas also exchange which parameters have gradients.
        bits = ring_bytes("all-gather", -(-len(shapes) // 8), replicas)
        known[0] += bits
    _require(
        outcomes[0][1] == known,
        "law 4, bytes are known beforehand",
        f"sent {outcomes[0][1]}, expected {known}",
    )
    most = dense_bytes(layout.numel, replicas)
    bare = [
        bytes_sent(scheme, layout, replicas, step, bare=True) for step in range(scheme.round.every)
    ]
    average = sum(bare) / scheme.round.every
    _require(
        average <= most,
        "law 5, never larger than dense",
        f"{average:,.0f} bytes per step, dense {most:,}",
    )
