"""Programs of training: lists of what a user does between two steps, on all replicas.

A program runs in a world of simulated replicas, of threads on an elastic axis, or of processes.
`reduced` has the oracle: a program without what must change nothing, in which going back to an
earlier state is never to have left it.
"""

import copy
import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.survive.agreement import ReplicaLeft, next_axis_store
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.flat.tensors import digest
from detonation.core.integrity.fault_counts import NonFiniteGradient
from limits import LIMIT_S
from steps import Died, together

Operation = tuple[Any, ...]
"""Its name and arguments; see the methods of `Replica`."""
NEUTRAL = {"evaluate", "state", "interrupt", "lose", "depart", "join"}
"""Operations that change nothing of what follows."""
FREEZABLE = ("layers.0.weight", "layers.2.bias")
TOKEN = b"0123456789abcdef"
_LR = 0.1


@dataclass(frozen=True)
class Kind:
    """A scheme, the same with other settings, and what its laws promise.

    rounds: replicas differ between rounds. conserves: what is not in the weights is in a memory.
    """

    scheme: Any
    other: Any = None
    momentum: float = 0.5
    rounds: bool = False
    conserves: bool = False


_demo = partial(dt.demo, chunk=8, decay=1.0, link="all-gather")
_rounds = partial(dt.diloco, outer_lr=0.7, outer_momentum=0.5)
SCHEMES = {
    "full": Kind(dt.full()),
    "demo": Kind(_demo(topk=2), _demo(topk=4), momentum=0.0, conserves=True),
    "demo-owner": Kind(dt.demo(topk=2, chunk=8, link="owner")),
    "diloco": Kind(_rounds(every=3), _rounds(every=2), rounds=True),
}


@dataclass(frozen=True)
class Setting:
    """What a program begins with. pair: two optimizers. same: all see the same batches."""

    kind: str
    pair: bool = False
    same: bool = True


class Interrupted(Exception):
    """An error in the middle of a loop, on all replicas."""


class Layers(nn.Module):
    """Four layers, of which the last joins an optimizer later, if at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:  # [batch, 16] -> [batch]
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean(1)


def first_model() -> Layers:
    model = Layers()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            made = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=made) / 2)
    return model


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@dataclass
class Outcome:
    """How a program ended on one replica.

    equal: by operation, the digest of the weights where all replicas must have the same. given: by
    step, the gradients that the optimizers took. unsent: what waits here. sizes: of the links; none
    of a replica that has left.
    """

    weights: Tensor
    equal: dict[int, str]
    given: dict[int, Tensor]
    unsent: Tensor | None
    sizes: set[int]


@dataclass
class Replica:
    """One replica that runs a program; each public method is an operation."""

    setting: Setting
    axis: Any
    number: int
    folder: Path | None = None
    arrival: Callable[["Replica"], None] | None = None
    tick: int = 0
    model: Layers = field(default_factory=first_model)
    optimizers: list[Any] = field(default_factory=list)
    given: dict[int, Tensor] = field(default_factory=dict)
    marks: dict[int, Any] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    dies: bool = False

    def __post_init__(self) -> None:
        self.kind = SCHEMES[self.setting.kind]
        self.scheme = self.kind.scheme
        self.parts = [self._layers(0, 1, 2)]
        if self.setting.pair:
            self.parts = [self._layers(0, 1), self._layers(2)]
        self.optimizers = self.optimizers or [self._made(part) for part in self.parts]

    def run(self, program: Sequence[Operation], first: int = 0) -> Outcome:
        """Runs the operations from number `first` on, until the last, or until it leaves."""
        equal = dict[int, str]()
        for at, (name, *arguments) in enumerate(program[first:], first):
            try:
                getattr(self, name)(*arguments)
            except ReplicaLeft:
                return Outcome(flat(self.model.parameters()), equal, self.given, None, set())
            if not self.kind.rounds or name == "synchronize":
                equal[at] = digest(self.model.parameters())
        return Outcome(
            flat(self.model.parameters()),
            equal,
            self.given,
            self._unsent() if self.kind.conserves else None,
            {each.link.replicas for one in self.optimizers for each in one.build()},
        )

    def backward(self) -> None:
        self._loss().backward()

    def zero(self) -> None:
        self.model.zero_grad()

    def step(self, optimizers: int = 2, completes: bool = False) -> None:
        """A step of the first optimizers alone, or of all; `completes` open rounds before it."""
        self.backward()
        if completes:
            self.synchronize()
        self._take(optimizers)

    def interrupt(self) -> None:
        """An error before the step, which somebody catches."""

        def closure() -> Tensor:
            raise Interrupted

        with suppress(Interrupted):
            self.optimizers[0].step(closure)

    def not_finite(self, mark: int) -> None:
        """A gradient without end, on all replicas, and back to an earlier state."""
        with suppress(NonFiniteGradient):
            (self._loss() * float("nan")).backward()
            self._take(2)
            raise AssertionError("a gradient that is not finite was taken")
        self.back(mark)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self._loss()
        self.model.train()

    def synchronize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.synchronize()

    def state(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state_dict()

    def mark(self, mark: int) -> None:
        """Notes the state, as `back` brings it back."""
        self.zero()
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self.marks[mark] = copy.deepcopy((self.model.state_dict(), states, self.tick, self.given))

    def back(self, mark: int) -> None:
        self.zero()
        weights, states, self.tick, self.given = copy.deepcopy(self.marks[mark])
        self.model.load_state_dict(weights)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def save(self, mark: int) -> None:
        """`mark` on disk."""
        self.mark(mark)
        for number, optimizer in enumerate(self.optimizers):
            dt.save_checkpoint(self._directory(mark, number), self.model, optimizer)

    def load(self, mark: int) -> None:
        self.zero()
        _, _, self.tick, self.given = copy.deepcopy(self.marks[mark])
        for number, optimizer in enumerate(self.optimizers):
            dt.load_checkpoint(self._directory(mark, number), self.model, optimizer)

    def freeze(self, *names: str) -> None:
        """Freezes these of the parameters that may be frozen, and unfreezes the others."""
        for name in FREEZABLE:
            self.model.get_parameter(name).requires_grad_(name not in names)

    def add(self) -> None:
        """Lets the last optimizer train one more layer."""
        self.parts[-1] = [*self.parts[-1], *self._layers(3)]
        self.optimizers[-1].add_param_group({"params": self._layers(3)})

    def reconfigure(self, other: bool) -> None:
        self.scheme = self.kind.other if other else self.kind.scheme
        for optimizer in self.optimizers:
            optimizer.reconfigure(self.scheme)

    def anew(self, number: int, holder: int) -> None:
        """Drops an optimizer and makes another one, as for another phase of training.

        Replica `holder` still holds the old one, as a local variable or a cycle of references does.
        """
        number %= len(self.optimizers)
        self.synchronize()
        if self.number == holder:
            self.held.append(self.optimizers[number])
        self.optimizers[number] = None
        gc.collect()
        self.optimizers[number] = self._made(self.parts[number])

    def lose(self, replica: int) -> None:
        """Lets a replica end in the next step, before its message."""
        self.dies = self.number == replica

    def depart(self, replica: int) -> None:
        """Asks a replica to leave before the next step."""
        if self.number == replica:
            self.axis.depart()
        with self.axis._changed:
            assert self.axis._changed.wait_for(lambda: replica in self.axis.departing, LIMIT_S)

    def join(self) -> None:
        """Trains until a replica has come in, and one step with it."""
        if self.arrival is not None:
            self.arrival(self)

    def _made(self, part: Sequence[Tensor]) -> Any:
        sgd = torch.optim.SGD(part, lr=_LR, momentum=self.kind.momentum)
        return dt.replicate(sgd, self.model, self.axis, self.scheme)

    def _layers(self, *numbers: int) -> list[Tensor]:
        return [each for number in numbers for each in self.model.layers[number].parameters()]

    def _loss(self) -> Tensor:
        seed = 1000 * self.tick + (0 if self.setting.same else self.number)
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        return self.model(inputs).mean()

    def _take(self, optimizers: int) -> None:
        if self.dies:
            raise Died
        given = [
            torch.zeros_like(p) if p.grad is None or not self._steps(p, optimizers) else p.grad
            for p in self.model.parameters()
        ]
        self.given[self.tick] = flat(given)
        try:
            for optimizer in self.optimizers[:optimizers]:
                optimizer.step()
        except ReplicaLeft:
            del self.given[self.tick]
            raise
        self.zero()
        self.tick += 1

    def _steps(self, parameter: Tensor, optimizers: int) -> bool:
        return any(parameter is each for part in self.parts[:optimizers] for each in part)

    def _unsent(self) -> Tensor:
        found = {
            key.partition("residual.")[2]: tensor
            for optimizer in self.optimizers
            for key, tensor in dt.replica_state(optimizer).items()
            if "residual." in key
        }
        return flat(
            found.get(name, torch.zeros_like(parameter))
            for name, parameter in self.model.named_parameters()
        )

    def _directory(self, mark: int, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{mark}-{number}"


def simulated(setting: Setting, program: Sequence[Operation], replicas: int = 2) -> list[Outcome]:
    """The program on simulated replicas."""

    def act(axis: Any) -> Outcome:
        return Replica(setting, axis, axis.replica).run(program)

    return simulate_replicas(act, replicas)


def of_processes(mesh: Any, setting: Setting, program: Sequence[Operation], folder: Path) -> Any:
    """The program on one process of a world of real ones."""
    axis = mesh["replicate"]
    return Replica(setting, axis, axis.get_local_rank(), folder).run(program)


def survived(
    setting: Setting, program: Sequence[Operation], folder: Path, replicas: int = 3
) -> tuple[list[Outcome], list[Outcome], list[Operation]]:
    """The program on an elastic axis: how it ended on replicas that stay, and on those that left.

    The operations are those that ran: steps in the place of `join`, until a replica had come in.
    """
    store = HashStore()
    arrivals = _Arrivals(setting, program, store, folder)

    def member(number: int) -> Outcome | None:
        own = next_axis_store(store, number, replicas)
        membership = Membership(own, number, replicas, 0, 1, 30.0, 1, print, confirm_s=30.0)
        axis = SurvivingCommunicator(membership, 30.0)
        replica = Replica(setting, axis, number, folder, arrivals.let_in)
        return _ended(replica, partial(replica.run, program))

    joins = [arrivals.come] if ("join",) in program else []
    ends = together(*(partial(member, number) for number in range(replicas)), *joins)
    stay = [end for end in ends if end and end.sizes]
    return stay, [end for end in ends if end and not end.sizes], arrivals.ran()


def _ended(replica: Replica, run: Callable[[], Outcome]) -> Outcome | None:
    """What `run` returns; None where the replica died."""
    axis = replica.axis
    try:
        end = run()
    except Died:
        with axis._changed:
            axis._closed = True
            axis._changed.notify_all()
        axis._membership.leave(0)
        axis._group.abandon()
        return None
    if end.sizes:
        axis.close()
    return end


class _Arrivals:
    """Lets a replica in on an elastic axis, where a program says so; at most once."""

    def __init__(
        self, setting: Setting, program: Sequence[Operation], store: HashStore, folder: Path
    ) -> None:
        self._setting, self._program, self._store, self._folder = setting, program, store, folder
        self._asks = threading.Event()
        self._began = 0, 0, ()
        self._steps = 0

    def let_in(self, replica: Replica) -> None:
        (optimizer,), size = replica.optimizers, replica.axis.size()
        frozen = [name for name in FREEZABLE if not _trains(replica.model, name)]
        self._began = replica.tick, optimizer.step_count, frozen
        door, steps = dt.Admission(replica.model, optimizer, token=TOKEN), 0
        self._asks.set()
        while replica.axis.size() == size:
            replica.step()
            door.after_step()
            steps += 1
        self._steps = steps

    def come(self) -> Outcome | None:
        assert self._asks.wait(LIMIT_S)
        tick, count, frozen = self._began
        model = first_model()
        guest = dt.Guest(self._store, silence_s=30.0)
        momentum = {"momentum": SCHEMES[self._setting.kind].momentum}
        make = partial(torch.optim.SGD, lr=_LR, **momentum)
        optimizer, axis = dt.admitted(model, guest, token=TOKEN, optimizer=make, timeout_s=LIMIT_S)
        tick += optimizer.step_count - count
        replica = Replica(
            self._setting, axis, guest.number, self._folder, None, tick, model, [optimizer]
        )
        replica.freeze(*frozen)
        replica.step()
        first = self._program.index(("join",)) + 1
        return _ended(replica, partial(replica.run, self._program, first))

    def ran(self) -> list[Operation]:
        found = list[Operation]()
        for operation in self._program:
            found += [("step",)] * self._steps if operation == ("join",) else [operation]
        return found


def _trains(model: nn.Module, name: str) -> bool:
    return model.get_parameter(name).requires_grad


def completed(program: Sequence[Operation]) -> list[Operation]:
    """The program where open rounds end before each step in which a replica leaves."""
    leaves = [operation[0] == "depart" for operation in program]
    return [
        ("step", 2, True) if before else operation
        for before, operation in zip([False, *leaves], program, strict=False)
    ]


def reduced(program: Sequence[Operation], kind: Kind) -> list[Operation]:
    """The program without what changes nothing, and without what it went back from."""
    line, marks, frozen = list[Operation](), dict[int, list[Operation]](), ("freeze",)
    for operation in completed(program) if kind.rounds else program:
        name = operation[0]
        if name == "freeze":
            frozen = operation
        if name in ("mark", "save"):
            line.append(("zero",))
            marks[operation[1]] = [*line]
        elif name in ("back", "load", "not_finite"):
            line = [*marks[operation[1]], frozen]
        elif name not in NEUTRAL and not (name == "synchronize" and line[-1:] == [operation]):
            line.append(operation)
    return line
