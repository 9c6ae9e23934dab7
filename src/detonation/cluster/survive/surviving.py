"""The communicator of an elastic axis. It continues without lost replicas: it repeats interrupted
collectives, or copies their results.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from detonation.cluster.init import note_loss
from detonation.cluster.interface import Way
from detonation.cluster.network.throttled import NodeLink
from detonation.cluster.shares import MicroBatch, micro_batches
from detonation.cluster.survive.agreement import (
    SIZE,
    Agreement,
    GuestEntry,
    RankReport,
    ReplicaLost,
)
from detonation.cluster.survive.groups import (
    ALL,
    NOBODY,
    Flight,
    Group,
    GroupAhead,
    NumberedCollective,
    NumberedKind,
    SurvivedLoss,
    floor_after,
    group_ahead,
    group_maker,
    holder_of,
    lost_of,
)
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.turns import (
    AxisUsers,
    Departure,
    changes_of,
    new_departures,
    new_entry,
    told_departures,
)
from detonation.cluster.survive.users import AxisEnd, AxisUser, Host
from detonation.core.link import Axis, HandOver
from detonation.core.schemes import Scheme

MOST_TRIES = 5
"""A rank gives up after this many agreements in a row without a new process group."""
_log = logging.getLogger("detonation")


class SurvivingCommunicator(AxisEnd):
    """The communicator of one rank on an elastic axis between replicas.

    losses: the losses, departures and joins after which this rank continued. host: lets new
    replicas join. listening: a text about the interface on which this rank listens; "" if this
    interface is loopback.

    All ranks start the same collectives in the same order, so each collective has a number. After a
    loss the ranks compare which collectives they have finished. If only some ranks have finished a
    collective, the remaining ranks copy its result, so that all continue with the same bytes. If no
    rank has finished a collective, all ranks repeat it without the lost replica. All ranks always
    repeat an all-to-all, because each replica receives different bytes in it.
    """

    def __init__(
        self,
        membership: Membership,
        timeout_s: float,
        floor: int = 0,
        entry: GuestEntry | None = None,
        let_in: Sequence[Agreement] = (),
        link: NodeLink | None = None,
        ahead: GroupAhead | None = None,
    ) -> None:
        self._ahead = ahead  # the group formed in advance for a joining replica
        self._membership = membership
        self.timeout_s = timeout_s
        self._link = link
        membership.patience_s = timeout_s
        self.listening = ""
        members = membership.members
        if let_in:
            members = let_in[0].members
        self.layout = list(members)
        self.host = Host(membership)
        self.replica = self.layout.index(membership.replica)
        self.losses: list[SurvivedLoss] = []
        self._kept: dict[int, NumberedCollective] = {}
        self._started = self._floor = floor
        self._entry = entry
        # the turn (step of an optimizer) before which a replica joins, and the replica's number
        self.guest: tuple[int, int] | None = None
        self.axis = self
        self.awaits = -1
        self.adopted = 0
        if entry:
            self.adopted = entry.turn
        self.departing: dict[int, Departure] = {}
        self.acting: AxisUser | None = None
        """The optimizer in whose step replicas leave now; None if no replica is leaving."""
        # the replicas that leave now, in the present step of the optimizer `acting`
        self.handed: Sequence[int] = ()
        self.users = AxisUsers(entry, [each for one in let_in for each in one.reports.values()])
        # the `AxisUser` of a training loop that calls this axis itself, without `replicate`
        self._own: AxisUser | None = None
        for agreement in let_in:  # reports also hold earlier decisions on leaving and joining
            for report in agreement.reports.values():
                leaving = {m: Departure(turns, gone) for m, turns, gone in report.departing}
                self.departing |= leaving
                if report.coming and report.coming[1] not in self.layout:
                    self._expect(*report.coming)
            self._note(agreement)
        self.pending = changes_of(self.layout, let_in)
        # this condition guards all state of this class, and each change notifies it
        self._changed = membership.changed
        self._recovering = self._broken = self._closed = False
        try:
            self._group = self._formed_ahead(let_in[-1:]) or self._formed()
        except RuntimeError:
            if let_in:
                raise
            self._broken = True  # makes all ranks agree on the members anew
            self._group = Group(
                PrefixStore(f"alone/{membership.rank}", membership.store), 0, 1, timeout_s
            )
        self.error: Exception | None = None
        # A second thread recovers, because the main thread may be blocked in gloo.
        threading.Thread(target=self._watch, name="recovery", daemon=True).start()

    def refuse(self, levels: Sequence[tuple[Axis, Scheme]], *_: object) -> None:
        """Raises `ValueError` unless this axis is the outermost level."""
        if levels[-1][0] is not self:
            raise ValueError(
                "only the outermost level may lose replicas: give the elastic axis to the last"
                " level"
            )

    def for_one(self, hand_over: HandOver | None = None) -> AxisUser:
        with self._changed:
            entry = self.users.entry
            if entry:
                # a running recovery relies on this rank's report that the step has not begun
                self.settle()
            user = AxisUser(self, hand_over)
            self.users.add(user, holds=self._recovering or bool(self.departing))
            if entry:  # begin the step, as all ranks do before they compare states
                user.begin_with_members(entry.step)
        return user

    def _first_user(self) -> AxisUser:
        present = self.users.present
        if not present:
            self._own = self.for_one()
            return self._own
        return present[0]

    def expects(self, step: int) -> bool:
        return self._first_user().expects(step)

    def enter_step(self, step: int) -> bool:
        return self._first_user().enter_step(step)

    def leaving(self, step: int) -> list[int]:
        return self._first_user().leaving(step)

    def adopt(self, step: int) -> list[int]:
        return self._first_user().adopt(step)

    @property
    def least(self) -> int:
        """Smallest number of replicas with which training may continue."""
        return self._membership.least

    def depart(self) -> None:
        """Asks all replicas to let this replica leave before one of the next steps, for example in
        a handler of SIGTERM.

        All replicas agree on the step. At that step open rounds end, and another replica receives
        this replica's unsent state of all optimizers on the axis. The step of this replica then
        raises `ReplicaLeft`; the other replicas continue. A call on one rank of the replica is
        enough. The call has no effect if fewer than `min_replicas` would remain.
        """
        self._membership.leaves = True

    def share(self, examples: int, largest: int | None = None) -> tuple[MicroBatch, ...]:
        """Returns this rank's part of the examples of a step, in micro-batches of at most
        `largest`.

        The members together compute each of the `examples` once, for any number of members. So a
        step keeps its examples when replicas are lost or join. Call `optimizer.renumber()` first,
        so that the axis has the members of this step.

        Example:
            >>> import torch, torch.distributed as dist, detonation as dt
            >>> axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore())
            >>> model = torch.nn.Linear(8, 1)
            >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> optimizer = dt.replicate(sgd, model, axis, dt.full())
            >>> data = torch.randn(100, 8)
            >>> for step in range(2):
            ...     optimizer.renumber()
            ...     of_step = data[7 * step : 7 * step + 7]
            ...     for micro in axis.share(7, largest=4):
            ...         loss = model(of_step[micro.examples]).square().mean()
            ...         (micro.weight * loss).backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> [micro.examples for micro in axis.share(7, largest=4)]
            [range(0, 4), range(4, 7)]
            >>> axis.close()
        """
        membership = self._membership
        shards = membership.shards
        rank = self.replica * shards + membership.shard
        if largest is None:
            largest = examples
        return micro_batches(examples, largest, rank, self.size() * shards, shards)

    @property
    def ranks_at_start(self) -> int:
        """Number of ranks with which the run began."""
        replicas, shards = map(int, self._membership.store.get(SIZE).split())
        return replicas * shards

    @property
    def is_first(self) -> bool:
        """True on the lowest-numbered replica, not counting replicas that are about to leave."""
        stay = [member for member in self.layout if member not in self.departing]
        return stay[:1] == [self._membership.replica] and not self._membership.leaves

    @property
    def _begun(self) -> int:
        joined = 0
        if self._entry:
            joined = self._entry.step
        return max([joined, *(user.turns.steps for user in self.users.present)])

    def forget_departed(self, members: Sequence[int]) -> None:
        """Forgets the departure of `members`, which have left."""
        for member in members:
            self.departing.pop(member, None)
        if not self.departing:
            self.users.let_go()

    def _listen(self, line: str) -> None:
        line = line and f"replica {self._membership.replica} is {line}"
        if line and line != self.listening:
            _log.info("%s", line)
        self.listening = line

    def way_to(self, replica: int) -> Way | None:
        """Returns the route on which the ranks of `replica` reach this rank; None if gloo chooses
        the route.
        """
        membership = self._membership
        first = replica * membership.shards
        return membership.ways.to(range(first, first + membership.shards))

    def close(self, limit_s: float = 5.0) -> None:
        """Leaves the run together with the remaining replicas; waits for them at most `limit_s`
        seconds. Collective.

        Another replica may need a result that only this replica has. So this replica takes part in
        recoveries until all replicas have taken their last step.
        """
        deadline = time.monotonic() + limit_s
        membership = self._membership
        membership.await_end(deadline, lambda: bool(self.error or membership.failure))
        limit_s = max(0.0, deadline - time.monotonic())
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            # wait for a running recovery, because nobody would end the group that it creates
            self._changed.wait_for(lambda: not self._recovering, limit_s)
        membership.leave(limit_s)
        self._group.abandon()

    def start(self, kind: NumberedKind, values: Tensor, user: AxisEnd) -> Callable[[], Tensor]:
        """Starts a collective between the replicas in `user.layout`. `user` is the communicator of
        one optimizer. Returns a function that waits for the result.
        """
        link = self._link
        name = kind.replace("_", "-")
        size = user.size()
        if link is None:
            return self._start(kind, values, user)
        leaves = torch.tensor([link.leave(name, values, size)], dtype=torch.float64)
        arriving = self._start(kind, values, user)
        # gather the times at which the messages leave: `_start` survives the loss of a replica
        told = self._start("all_gather", leaves.view(torch.uint8), user)

        def arrived() -> Tensor:
            result = arriving()
            absent = user.absent
            link.arrive(name, told().view(torch.float64), size, values.nbytes)
            user.absent = absent
            return result

        return arrived

    def _start(self, kind: NumberedKind, values: Tensor, user: AxisEnd) -> Callable[[], Tensor]:
        sent = values.cpu()  # gloo sends from host memory only
        with self._changed:
            self.settle()
            self._started += 1
            self._membership.started = self._started
            each = NumberedCollective(
                self._started, kind, sent, user.layout, self._floor, user.layout, sent
            )
            self._kept[each.number] = each
            self._launch(each)
        return partial(self._wait, each, values.device, user)

    def settle(self) -> None:
        """Waits until no recovery is running. Raises an error if this replica cannot continue."""
        membership = self._membership
        self._changed.wait_for(lambda: not self._is_busy() or self.error or membership.failure)
        membership.require_store()
        if self.error:
            membership.told = True
            raise self.error

    def _is_busy(self) -> bool:
        return self._recovering or self._broken

    def _launch(self, each: NumberedCollective) -> None:
        """Starts or repeats the collective `each`, between the replicas in `each.layout` that are
        still members.
        """
        each.members = [member for member in self._membership.members if member in each.layout]
        work = None
        each.flight = None
        try:
            if each.kind == "all_reduce":
                # copy the summands, because gloo overwrites its tensor with the sum
                each.target = each.sent.clone()
                work = self._group.all_reduce(each.target)
            elif each.kind == "all_gather":
                each.target = each.sent.new_empty(len(each.members), each.sent.numel())
                work = self._group.all_gather(each.target, each.sent)
            else:
                rows = each.sent.view(len(each.layout), -1)
                if each.members != each.layout:
                    rows = rows[[each.layout.index(member) for member in each.members]]
                each.target = torch.empty_like(rows)
                work = self._group.all_to_all(each.target, rows)
        except RuntimeError:  # another member has closed its connection
            return
        each.flight = Flight(work, self._notify)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, each: NumberedCollective, device: torch.device, user: AxisEnd) -> Tensor:
        with self._changed:
            self._membership.waits_in = each.number
            try:
                result = self._awaited(each)
            finally:
                self._membership.waits_in = 0
            user.absent = each.absent
        return result.to(device)

    def _awaited(self, each: NumberedCollective) -> Tensor:
        while each.result is None:
            self.settle()
            if each.result is None and each.flight is not None and not each.flight.ended:
                self._changed.wait()
            elif each.result is None and not self._take(each):
                self._broken = True  # now the thread of `_watch` begins a recovery
                self._changed.notify_all()
        return each.result

    def _take(self, each: NumberedCollective) -> bool:
        """Records the result of the collective `each`, which has ended. Returns False if the
        collective failed.
        """
        if each.flight is None or not each.flight.good:
            return False
        missing = lost_of(each.layout, each.members)
        result = each.target
        if missing and each.kind != "all_reduce":
            result = result.new_zeros(len(each.layout), result.shape[1])
            result[[each.layout.index(member) for member in each.members]] = each.target
        self._conclude(each, result, missing)
        for number in [number for number in self._kept if number <= each.floor]:
            del self._kept[number]
        return True

    def _conclude(self, each: NumberedCollective, result: Tensor, absent: list[int]) -> None:
        each.result = result
        each.absent = frozenset(absent)
        self._floor = floor_after(self._floor, self._kept)

    def _watch(self) -> None:
        """Recovers from each loss of replicas, in its own thread, until the axis is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._membership.called or self._broken or self._closed
                )
                if self._closed:
                    return
                self._recovering = True
                self._broken = False
            # do not raise here: the main thread, which waits, raises `self.error`
            try:
                self._recover()
            except ReplicaLost as error:
                self.error = error
            except Exception as error:
                self.error = ReplicaLost(f"cannot recover: {error!r}")
            with self._changed:
                self._recovering = False
                self._changed.notify_all()
            if self.error:
                return

    def _recover(self) -> None:
        """Agrees on the members with all ranks that are not lost, and hands the new members to all
        optimizers. Collective.
        """
        membership = self._membership
        noticed = time.monotonic()
        before = list(membership.members)
        if membership.called:
            noticed = min(noticed, membership.noticed_at)
        agreements = self._regroup()
        with self._changed:  # hold the lock: an optimizer created now must get the new members
            for end in (self, *self.users.present):
                end.pending += changes_of(before, agreements)
        self._log_change(before, agreements[-1], time.monotonic() - noticed)

    def _regroup(self) -> list[Agreement]:
        """Agrees on the members with all ranks, and forms their process group. Agrees and forms a
        group again if another replica is lost meanwhile. Returns all agreements.
        """
        membership = self._membership
        why = ""
        agreements = []
        for _ in range(MOST_TRIES):
            agreement = membership.agree(self._report())
            agreements.append(agreement)
            if agreement.awaited >= 0:
                self.guest = None
                self.awaits = -1
            # record each agreement, even if no process group can be formed after it
            self._note(agreement)
            self._group.abandon()
            try:
                self._group = self._formed_ahead([agreement]) or self._formed()
            # another replica is lost, so agree again without it
            except RuntimeError as error:
                why = f": {error}".partition("\n")[0]
                membership.doubt()
                continue
            if self._catch_up(agreement):
                return agreements
        raise ReplicaLost(f"the replicas {membership.members} could not form a process group{why}")

    def _log_change(self, before: Sequence[int], agreement: Agreement, seconds: float) -> None:
        """Records in `losses` which replicas were lost or joined. If a replica was lost, the first
        rank also logs the loss.
        """
        membership = self._membership
        lost = tuple(member for member in before if member not in membership.members)
        if lost:
            note_loss()
        came = tuple(member for member in membership.members if member not in before)
        left = bool(lost) and {*lost} <= self.departing.keys()
        self.losses.append(SurvivedLoss(lost, agreement.next_step, seconds, came, left))
        if lost and membership.rank == membership.members[0] * membership.shards:
            _log.warning("%s", self.losses[-1].text(len(membership.members), len(self.layout)))

    def _note(self, agreement: Agreement) -> None:
        """Records which replicas leave and which replica joins because of `agreement`. They do so
        before a turn (a step of an optimizer) that no rank has reached. Replicas leave only if
        enough replicas remain. A replica that is already recorded keeps its turn.
        """
        membership = self._membership
        shards = membership.shards
        if membership.replica in agreement.asked(shards):
            membership.leaves = False  # all ranks know the request to leave now
        self.departing |= new_departures(agreement, self.departing, shards, membership.least)
        if agreement.guest >= 0 and agreement.guest != (self.guest or (0, -1))[1]:
            door = self.host.door_of(agreement.guest)
            self._expect(*new_entry(agreement, door))
            self._ahead, line = group_ahead(membership, agreement, self.timeout_s)
            self._listen(line)
        if not self.departing:
            self.users.let_go()

    def _expect(self, turn: int, guest: int) -> None:
        """Records that the replica `guest` joins before `turn`, a step of the optimizer that lets
        it in.
        """
        self.guest = turn, guest
        self._membership.guest_comes = True
        self.host.door = self.host.door_of(guest)

    def _report(self) -> RankReport:
        for each in self._kept.values():
            ended = each.flight is not None and each.flight.ended
            if each.result is None and each.kind != "all_to_all" and ended:
                floor = each.floor
                each.floor = 0  # so that `_take`, which deletes collectives up to it, deletes none
                self._take(each)
                each.floor = floor
        done = [each for each in self._kept.values() if each.result is not None]
        beyond = [each.number for each in done if each.number > self._floor]
        absent = {str(each.number): sorted(each.absent) for each in done}
        with self._changed:  # a new optimizer must be in both `turns` and `alive`, or in neither
            turns = list(self.users.turns)
            alive = self.users.hold()
        return RankReport(
            self._floor,
            beyond,
            absent,
            self._begun,
            self.awaits,
            [each.begun for each in turns],
            self._membership.leaves,
            [each.entered for each in turns],
            told_departures(self.departing),
            self.guest,
            alive,
            ahead=self._ahead.formed if self._ahead else [],
        )

    def _formed_ahead(self, agreements: Sequence[Agreement]) -> Group | None:
        """Returns the process group that all ranks have formed in advance for the last of
        `agreements`; None if there is no such group.
        """
        ahead = self._ahead
        # if no replica is about to join, no later call needs the process group formed in advance
        if self.guest is None:
            self._ahead = None
        if ahead and agreements and agreements[-1].formed:
            return ahead.take()
        return None

    def _formed(self) -> Group:
        membership = self._membership
        name = str(membership.epoch)
        make, line = group_maker(membership, membership.members, name, self.timeout_s)
        self._listen(line)
        in_vain = membership.some_left
        if membership.epoch:
            in_vain = membership.breaks_up
        return Group.formed(make, in_vain)

    def _catch_up(self, agreement: Agreement) -> bool:
        """Copies the results of collectives that only some ranks have finished, and repeats
        collectives that no rank has finished. Returns False if another replica is lost meanwhile.
        """
        membership = self._membership
        ranks = [member * membership.shards + membership.shard for member in agreement.members]
        reports = [agreement.reports[rank] for rank in ranks]
        for each in list(self._kept.values()):
            holder = holder_of(each.number, each.kind, reports)
            if holder == NOBODY:
                self._launch(each)
            elif holder != ALL and not self._copied(each, holder, reports[holder]):
                return False
        return True

    def _copied(self, each: NumberedCollective, holder: int, report: RankReport) -> bool:
        """Copies the result of the collective `each` from one member to all members that lack the
        result. This member has the index `holder`, and `report` is its report. Returns False if
        another replica is lost meanwhile.
        """
        held = each.result
        if held is None:
            shape = [*each.sent.shape]
            if each.kind != "all_reduce":
                shape.insert(0, len(each.layout))
            held = each.sent.new_empty(shape)
        try:
            flight = Flight(self._group.broadcast(held, holder), self._notify)
        except RuntimeError:
            return False
        with self._changed:
            waits_in = self._membership.waits_in
            self._membership.waits_in = each.number
            self._changed.wait_for(lambda: flight.ended or self._membership.called)
            self._membership.waits_in = waits_in
        if not flight.good:
            return False
        if each.result is None:
            self._conclude(each, held, report.absent[str(each.number)])
        return True
