"""A run among replicas that may be lost, or come: where it may start, those that come in, and those
it has lost."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    """The set-up of this replica of an elastic run: a fault of it ends all replicas, which survive
    later ones.

    The others hear of a fault at the store of their axis, or before there is one where all meet;
    see `refusal`.
    """

    def __init__(self, task_meet: str, replica: int | None) -> None:
        self._meet, self._replica = task_meet, replica
        self._start: Preparation | None = None
        self._done = False

    def met(self, axis: SurvivingCommunicator) -> None:
        """All replicas have met on `axis`."""
        self._start = axis.host.membership.start
        self._start.begin()

    def done(self) -> None:
        """This replica is about to train."""
        if self._start is not None:
            self._start.prepared()
        self._done = True

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raises `SetUpError` for any fault until `done`, but those that others cause, and lets the
        others know."""
        try:
            yield
        except Exception as error:
            if (
                self._done
                or isinstance(error, TimeoutError | ReplicaLost)
                or is_network_error(error)
            ):
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
    """Where the replicas of `request` meet, also where the rest of its settings is wrong; "" where
    that is unknown."""
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
    """Raises `ValueError` where an elastic run cannot start as `request` wants it."""
    number, mesh, last = request.replica, config.mesh, config.levels[-1].replicas
    if request.join and len(config.levels) > 1:
        raise ValueError("nobody comes in under several levels: start all replicas with the run")
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
    """The session of a replica that comes in while others train, at the store of `address`.
    Collective.

    Where it is to be chosen, the scheme is that of the run. Its weights and the state of its
    optimizer are those of the others; `optimizer.step_count` is the step.
    """
    read_token()  # all that this replica can find out comes before the others hear of it
    directory.require_writable(out)
    store = reached_store(*host_and_port(address))
    mesh = init_mesh(1, config.mesh.shards, device.type)
    model = seeded_model(config).to(device)
    shard(model, mesh, wire=config.mesh.shard_wire)
    alike: dict[str, Any] = {
        "min_replicas": config.mesh.min_replicas,
        "silence_s": config.peers.silence_s,
    }
    guest = Guest(store, mesh, link=config.mesh.link, **alike)
    if asked is not None:  # before its own settings: those that train may still be choosing
        settings = settings_of_run(guest.membership)
        theirs = {
            key.removeprefix("scheme."): each
            for key, each in settings.items()
            if key.startswith("scheme.")
        }
        config = asked.under(theirs)
    require_same_settings(guest.membership, config)
    optimizer, axis = admitted(model, guest, safety=safety(config), timeout_s=_WAIT_S)
    return Session(
        config,
        ElasticRanks(mesh, axis),
        device,
        load_data(config.data),
        model,
        optimizer.base,
        optimizer,
    )


class Losses:
    """The replicas that a run has lost and survived; nothing where a loss ends the run."""

    def __init__(self, session: Session, set_up: SetUp) -> None:
        self._session, self._told, self.set_up = session, 0, set_up
        self._world = session.world if isinstance(session.world, ElasticRanks) else None
        self._lock: directory.RunDirectory | None = None
        self._losses: list[Table] = []

    def news(self, path: Path, recorder: Recorder) -> list[str]:
        """The losses since the last call, in lines.

        The first replica that is left takes over the run directory.
        """
        if self._world is None:
            return []
        if recorder.take_over():
            with contextlib.suppress(directory.InUse):  # by the lost one, which only stands still
                self._lock = directory.RunDirectory(path)
        new, self._told = self._world.losses[self._told :], len(self._world.losses)
        return [line for change in new for line in self._lines(change)]

    def _lines(self, change: SurvivedLoss) -> Iterator[str]:
        if change.came:
            yield f"replica {_numbers(change.came)} joined before step {change.next_step + 1}"
        if change.replicas:
            norm, seconds = memory_norm(self._session.optimizer), change.recovered_s
            found = {
                "replicas": [*change.replicas],
                "last_step": change.next_step,
                "recovered_s": seconds,
            }
            if change.left:
                self._losses.append({**found, "left": True})
                where = "what it had not sent is with the others"
                yield (
                    f"replica {_numbers(change.replicas)} left after step {change.next_step}, as"
                    f" asked; {where}"
                )
                return
            self._losses.append({**found, "memory_norm": norm})
            went_on = f"the others went on {seconds:.2f} s after the notice"
            lost = f"lost replica {_numbers(change.replicas)} after step {change.next_step}"
            yield f"{lost}, and its memory (here of norm {norm:.3g}); {went_on}"

    def table(self) -> Table:
        if self._world is None:
            return {}
        return {
            "replicas_left": self._session.optimizer.coordinates.replicas,
            "losses": self._losses,
        }

    def close(self, has_left: bool) -> None:
        """Leaves together with the replicas that are left, unless this one `has_left` before them."""
        if self._world is not None and not has_left:
            self._world.close()
        if self._lock is not None:
            self._lock.close()


def _numbers(replicas: Sequence[int]) -> str:
    return ", ".join(map(str, replicas))
