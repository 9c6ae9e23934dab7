"""Elastic runs: checks at the start, replicas that join, and replicas that are lost."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from detonation.cluster.init import LaunchPosition
from detonation.cluster.mesh import init_mesh, shard
from detonation.cluster.position import host_and_port, require_known_host
from detonation.cluster.processes.failure import describe, is_network_error
from detonation.cluster.processes.refusal import Preparation, refuse_start
from detonation.cluster.processes.rendezvous import reached_store
from detonation.cluster.survive.agreement import ReplicaLost
from detonation.cluster.survive.elastic_axis import Guest
from detonation.cluster.survive.groups import SurvivedLoss
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.feed.admission import admitted
from detonation.feed.shared_state import memory_norm
from detonation.feed.token import read_token
from detonation.train.loop.session import Session, load_data, safety, seeded_model
from detonation.train.loop.world import ElasticRanks, require_same_settings, settings_of_run
from detonation.train.output import directory
from detonation.train.recipe.resolve import Request
from detonation.train.recipe.schema import Config, Table
from detonation.train.run.decide import Asked
from detonation.train.run.recorder import Recorder

_WAIT_S = 300.0


class SetUpError(ValueError):
    """This replica cannot start."""


class SetUp:
    """Set-up of this replica of an elastic run. Only a failure during set-up ends all replicas.

    The others read the failure in the store of their axis. Before that store exists, they read it
    at the meeting address; see `refusal`.
    """

    def __init__(self, task_meet: str, replica: int | None) -> None:
        self._meet = task_meet
        self._replica = replica
        self._start: Preparation | None = None
        self._done = False

    def met(self, axis: SurvivingCommunicator) -> None:
        """Records that all replicas have met on `axis`."""
        self._start = axis.host.membership.start
        self._start.begin()

    def done(self) -> None:
        """Records that this replica is ready to train."""
        if self._start is not None:
            self._start.prepared()
        self._done = True

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager that reports failures of this replica to the others until `done`, and
        raises `SetUpError`.

        Failures caused by other replicas pass through, and so does a `ValueError`.
        """
        try:
            yield
        except Exception as error:
            from_others = isinstance(error, TimeoutError | ReplicaLost) or is_network_error(error)
            if self._done or from_others:
                raise
            self._tell(describe(error))
            if isinstance(error, ValueError) or self._start is None:
                raise
            raise SetUpError(describe(error)) from error

    def _tell(self, reason: str) -> None:
        if self._start is not None:
            self._start.refuse(reason)
        elif self._replica is not None and self._meet:
            refuse_start(*host_and_port(self._meet), self._replica, reason)


def meeting_of(request: Request) -> str:
    """The address at which the replicas of `request` meet; "" if there is none.

    Other settings of the request may be invalid.
    """
    for each in reversed(request.overrides):
        key, _, value = each.partition("=")
        if key.strip() == "mesh.meet":
            return value.strip().strip("\"'")
    with contextlib.suppress(ValueError):
        return request.layers(None).config().mesh.meet
    return ""


def check_place(
    request: Request, config: Config, place: LaunchPosition | None, asked: Asked | None
) -> None:
    """Raises `ValueError` if the elastic options of `request` conflict."""
    number = request.replica
    mesh = config.mesh
    last = config.levels[-1].replicas
    if request.join and len(config.levels) > 1:
        raise ValueError(
            "replicas cannot join a run with several levels: start all replicas with the run"
        )
    if (mesh.elastic or request.join) and asked and asked.auto.adapt:
        raise ValueError(
            "scheme.adapt watches the link of replicas that stay: leave it out in an elastic run"
        )
    if number is not None and not (mesh.elastic and mesh.meet and 0 <= number < last):
        raise ValueError(
            f"--replica {number} needs --elastic, --meet HOST:PORT and 0 <= replica < {last}"
        )
    if mesh.elastic and place is not None and number is None and not request.join:
        raise ValueError(
            "under a launcher an elastic run is one world for each replica: give --replica and"
            " --meet"
        )
    if request.join and request.out is None:
        raise ValueError("--join needs --out: the run directory, for checkpoints")
    for flag, address in (("--meet", mesh.meet), ("--join", request.join)):
        if address:
            require_known_host(flag, address)


def joined_session(
    config: Config, asked: Asked | None, device: torch.device, address: str, out: Path
) -> Session:
    """Session of a replica that joins a run through the store at `address`. Collective.

    Scheme "auto" becomes the scheme of the run. Weights, optimizer state and `step_count` are
    copied from the run.
    """
    read_token()  # check everything local before other replicas know this one
    directory.require_writable(out)
    store = reached_store(*host_and_port(address))
    mesh = init_mesh(1, config.mesh.shards, device.type)
    model = seeded_model(config).to(device)
    shard(model, mesh, wire=config.mesh.shard_wire)
    guest = Guest(
        store,
        mesh,
        link=config.mesh.link,
        min_replicas=config.mesh.min_replicas,
        silence_s=config.peers.silence_s,
    )
    # ask for the settings first, because the run may still be choosing its scheme
    if asked is not None:
        settings = settings_of_run(guest.membership)
        scheme = {
            key.removeprefix("scheme."): value
            for key, value in settings.items()
            if key.startswith("scheme.")
        }
        config = asked.under(scheme)
    require_same_settings(guest.membership, config)
    optimizer, axis = admitted(model, guest, safety=safety(config), timeout_s=_WAIT_S)
    world = ElasticRanks(mesh, axis)
    data = load_data(config.data)
    return Session(config, world, device, data, model, optimizer.base, optimizer)


class Losses:
    """Lost replicas of an elastic run: log them, count them, re-elect the writer."""

    def __init__(self, session: Session, set_up: SetUp) -> None:
        self._session = session
        self._told = 0
        self.set_up = set_up
        self._world: ElasticRanks | None = None
        if isinstance(session.world, ElasticRanks):
            self._world = session.world
        self._lock: directory.RunDirectory | None = None
        self._losses: list[Table] = []

    def news(self, path: Path, recorder: Recorder) -> list[str]:
        """Lines about the losses since the last call.

        The first remaining replica takes over the run directory.
        """
        if self._world is None:
            return []
        if recorder.take_over():
            # a lost replica may hang while holding the lock
            with contextlib.suppress(directory.InUse):
                self._lock = directory.RunDirectory(path)
        new = self._world.losses[self._told :]
        self._told = len(self._world.losses)
        return [line for change in new for line in self._lines(change)]

    def _lines(self, change: SurvivedLoss) -> Iterator[str]:
        if change.came:
            yield f"replica {_numbers(change.came)} joined before step {change.next_step + 1}"
        if not change.replicas:
            return
        norm = memory_norm(self._session.optimizer)
        seconds = change.recovered_s
        number = _numbers(change.replicas)
        found = {
            "replicas": [*change.replicas],
            "last_step": change.next_step,
            "recovered_s": seconds,
        }
        if change.left:
            self._losses.append({**found, "left": True})
            yield (
                f"replica {number} left after step {change.next_step}, as asked; it gave the others"
                " the momentum that it had not sent"
            )
            return
        self._losses.append({**found, "memory_norm": norm})
        yield (
            f"lost replica {number} after step {change.next_step}, and its memory (here of norm"
            f" {norm:.3g}); the others went on {seconds:.2f} s after the notice"
        )

    def table(self) -> Table:
        if self._world is None:
            return {}
        return {
            "replicas_left": self._session.optimizer.coordinates.replicas,
            "losses": self._losses,
        }

    def close(self, has_left: bool) -> None:
        """Leaves together with the remaining replicas, unless this one `has_left` earlier."""
        if self._world is not None and not has_left:
            self._world.close()
        if self._lock is not None:
            self._lock.close()


def _numbers(replicas: Sequence[int]) -> str:
    return ", ".join(map(str, replicas))
