"""The stop consensus: if one rank has a reason to stop, all ranks stop at the same step and raise
the same error.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detonation.core import runtime
from detonation.core.agreement.desync import (
    CHANGE,
    announce_change,
    differences,
    numbers_of,
    repaired,
)
from detonation.core.agreement.gates import StepGate
from detonation.core.agreement.options import USUAL, use_python_numbers
from detonation.core.agreement.safety import Safety
from detonation.core.base_error import DetonationError
from detonation.core.flat.tensors import Piece
from detonation.core.integrity.fault_counts import NEW_PARAMETER, FaultCounts
from detonation.core.integrity.message import hash63
from detonation.core.link import Level, Link, links_of_shards
from detonation.core.replicator import Replicator, Transfer
from detonation.core.runtime import Readback, Runtime

_FATAL = attrgetter("fatal")
_log = logging.getLogger("detonation")


class HalfStep(DetonationError, RuntimeError):
    """Raised if the previous step failed on this replica after the messages were sent and before
    the weights moved. Other replicas may then be one step ahead.
    """


class StopConsensus:
    """Makes all ranks stop at the same step with the same error. Holds the fault counts of all
    levels of replication, and the links over which ranks exchange their reasons to stop.

    Replicas that receive the same messages see the same faults. The shards of a replica receive
    different messages, so the shards must exchange their reasons to stop. The replicas of each
    level must exchange their reasons, too, if there are several levels, or if only an owner (the
    replica that aggregates some rows) receives a message.

    On an accelerator, the host does not wait for the faults of the current step. It reads the fault
    counts of a step when the next step begins. If ranks must exchange reasons to stop, the error is
    raised one more step later.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], runtime: Runtime, safety: Safety, base: Optimizer
    ) -> None:
        self.safety = safety
        self.counts: list[FaultCounts] = []
        self._base = base
        compared = None
        if safety.verify_every:
            compared = base
        self._numbers = numbers_of(compared)
        # a hook that `verify` calls before replicas compare the base optimizer's options
        self.look: Callable[[], object] = lambda: None
        self.compare = differences  # `verify` calls this function to find tensors that differ
        self.runtime = runtime
        self.decides_on_device = runtime.decides_on_device
        # why the last step failed after its messages were sent; "" if that did not happen
        self.half_step = ""
        self.shards = links_of_shards(parameters.values())
        self._sharded = {
            name: each for name, each in parameters.items() if isinstance(each, DTensor)
        }
        self._others = self.shards
        self._asks = False
        self.gates: list[StepGate] = []  # gates are optional parts of a step, called in this order
        # most serious reason to stop of all ranks, and its step; the next check raises the error
        self._asked: tuple[Readback, int] | None = None

    def add_level(
        self, names: Sequence[str], link: Link, gradients: bool, level: int
    ) -> FaultCounts:
        """Creates and returns the fault counts for `link`, the link of a level of replication.

        Args:
            names: Names of all parameters of the model.
            gradients: True if the messages carry gradients, False for changes of parameters.
        """
        signal = "the change"
        if gradients:
            signal = "the gradient"
        repairs = self.safety.on_desync == "repair"
        counts = FaultCounts(names, link.replica, self.safety.non_finite, repairs, signal)
        counts.number = 2 * level + (link.local_ranks > 1)
        self.counts.append(counts)
        return counts

    def connect(self, levels: Sequence[Level], replicators: Sequence[Replicator]) -> None:
        """Chooses the links on which ranks exchange reasons to stop. These are always the links
        between the shards of this replica. If there are several levels, or if not every replica
        receives every message, the links of all levels are added.
        """
        several = sum(scheme.signal != "nothing" for _, scheme in levels) > 1
        secluded = any(replicator.channel.exchange.secluded for replicator in replicators)
        links: list[Link] = []
        if several or secluded:
            links = list({id(each.link.axis): each.link for each in replicators}.values())
        # The exchange between shards comes last, because only some shards may know a reason.
        # For example, only some shards received the last message of a lost replica.
        self._others = (*links, *self.shards)
        parameters = [p for each in replicators for p in each.parameters.values()]
        in_pieces = any(isinstance(parameter, Piece) for parameter in parameters)
        self._asks = bool(self._others) or in_pieces

    def enter_step(self, step: int) -> None:
        """Begins a step. Must be called before the first message of the step is sent, in backward
        or in `step`.

        Reads the numeric options of the parameter groups, such as lr. The messages of the step
        carry a digest of these options, so that replicas notice if their options differ.

        Raises:
            HalfStep: The last step ended half-way.
        """
        if self.half_step:
            raise HalfStep(
                f"{self.half_step}; other replicas may have taken this step: load a checkpoint"
                " on all replicas"
            )
        # only the types of options are checked, because converting all options would take time
        for group in self._base.param_groups:
            kinds = {*map(type, group.values())}
            for value in group.values():
                if type(value) is tuple:
                    kinds.update(map(type, value))
            if not kinds <= USUAL:
                use_python_numbers(group)
        sizes = [len(group["params"]) for group in self._base.param_groups]
        options = "; ".join(map(self._numbers, self._base.param_groups)) + f" for {sizes}"
        for counts in self.counts:
            counts.options = options.encode()
        if self.decides_on_device:
            self.begin(step)

    def compare_use(self, step: int) -> None:
        """Raises `ValueError` if the shards of this replica have gradients of different parameters.
        Collective over the shards.

        FSDP2 adds the gradients that the ranks have, in order. So if the ranks used different
        parameters, it has added gradients of different parameters.
        """
        if not self.shards:
            return
        missing = [name for name, each in self._sharded.items() if each.grad is None]
        number = hash63(repr(missing))
        ends = torch.tensor([number, -number], dtype=torch.int64, device=self.runtime.device)
        for link in self.shards:
            ends = link.collect(ends, apart=True).view(-1, 2).amax(0)
        largest, smallest = ends.tolist()
        if largest != -smallest:
            raise ValueError(
                f"at step {step} the ranks of a node have gradients of different parameters (this"
                f" rank lacks {missing[:3]}), which FSDP2 mixes: use the same parameters on all"
                " ranks, for example by adding 0 times the output of each other head"
            )

    def idle(self, step: int) -> bool:
        """True if a gate (an optional part of the step) makes this replica skip `step`."""
        return any(gate.idle(step) for gate in self.gates)

    def step_through_gates(self, take: Callable[[], object], step: int) -> None:
        """Calls `take`, the step of the base optimizer, unless this replica skips the step. Then
        calls `moved` of all gates. Collective."""
        idle = self.idle(step)
        if not idle:
            take()
        for gate in self.gates:
            gate.moved(step, idle)

    def forget(self) -> None:
        """Forgets earlier faults and the failure of the last step. Called after all replicas have
        loaded a new state."""
        self.half_step = ""
        self._asked = None
        for counts in self.counts:
            counts.forget()

    def begin(self, step: int) -> None:
        """Raises an error on all ranks if an earlier step had a fault that must stop training. Used
        only if the device detects faults, because the host then reads the fault counts late.
        Collective.
        """
        if self._asked:
            self._raise_asked()
        if not self._arrived(step - 1):
            return
        if self._asks:
            gravest = self._gravest_anywhere(self._gravest_known())
            self._asked = runtime.Readback(gravest), step - 1
        elif any(map(_FATAL, self.counts)):
            self._raise(self._gravest_known(), step - 1)

    def end(self, step: int) -> None:
        """Raises an error on all ranks if any rank knows a reason to stop. If the device detects
        faults, raises nothing: `begin` of a later step raises the error. Then calls `end` of all
        gates. Collective.
        """
        arrived = not self.decides_on_device and self._arrived(step)
        if arrived and (self._others or any(map(_FATAL, self.counts))):
            self._settle(step)
        for gate in self.gates:
            gate.end(step)

    def conclude(self, step: int) -> None:
        """Raises an error on all ranks if any rank has a reason to stop. Unlike `end`, this method
        waits for a device that detects faults. Called after `step` steps, when no message is in
        flight. Collective.
        """
        self._decide(step, math.inf)

    def announce(
        self, replicators: Sequence[Replicator], step: int, name: str, in_buckets: bool
    ) -> None:
        """Announces that this rank starts or stops training the parameter `name`, from `step` on.
        Raises an error on all ranks unless all ranks announce the same change.

        A rank that changes its trained parameters sends an empty message instead of its next
        message, which is due at `step` or at the end of the round. A rank without a change sends a
        normal message of the same size. So the ranks with a change and the ranks without one detect
        the difference. Steps without a change need no extra message. If all ranks announce the same
        change, they begin `step` afterwards.

        Args:
            in_buckets: True if the messages of this step are sent in buckets.
        """
        if name not in self.counts[0].names:
            name = NEW_PARAMETER
        acting = [replicator for replicator in replicators if replicator.acts_before] or replicators
        sent: list[tuple[Replicator, list[Transfer]]] = []
        at = step
        while not sent:
            for replicator in acting:
                is_first = replicator is replicators[0]
                transfers = replicator.announce(step, at, name, in_buckets and is_first)
                if transfers:
                    sent.append((replicator, transfers))
            self._meet(at, name)
            at += 1
            if not sent and self.safety.verify_every and at % self.safety.verify_every == 0:
                self._meet_verify(replicators, at, name)
        for replicator, transfers in sent:
            replicator.discard(transfers)
        delay = max(replicator.scheme.round.delay for replicator, _ in sent)
        self._decide(step, at - 1 + delay)
        for counts in self.counts:
            counts.end_change()

    def _meet(self, step: int, name: str) -> None:
        """Exchanges the reasons to stop after `step`, on a rank that announces a change: it starts
        or stops training the parameter `name`.

        Ranks without such a change run the same collectives in `end`. If the device detects faults,
        these ranks run the collectives in `begin` of the next step.
        """
        if not self._arrived(step):
            return
        fatal = self._gravest_known()
        if not fatal >> 4:
            fatal = self.counts[0].announcement(name) << 4 | self.counts[0].number
        for link in self._others:
            mine = torch.full((1,), fatal, dtype=torch.int64, device=self.runtime.device)
            everyone = link.collect(mine, apart=True).view(-1).tolist()
            reason = FaultCounts.announced_apart([each >> 4 for each in everyone])
            fatal = reason << 4 | max(everyone) & 15
        if not FaultCounts.is_announcement(fatal >> 4):
            self._raise(fatal, step)

    def _meet_verify(self, replicators: Sequence[Replicator], step: int, name: str) -> None:
        """Exchanges announcements, on a rank that announces a change: it starts or stops training
        the parameter `name`.

        Ranks without such a change call `verify` after `step` steps, which runs the same
        collectives.
        """
        self._drain(replicators, step)
        for replicator in replicators:
            link = replicator.link
            counts = replicator.counts
            counts.changing = link.replicas
            number = counts.names.index(name)
            for sender in announce_change(link, number, self.runtime.device):
                counts.announced(sender, name)
            counts.due.add(step - 1)
        self._decide(step, step - 1)

    def _drain(self, replicators: Sequence[Replicator], step: int) -> None:
        """Waits for messages in flight. Then raises an error if only some replicas announced a
        change of the trained parameters. This happens before a comparison starts, because the
        replicas that announced the change run no further collectives of this step.
        """
        for replicator in replicators:
            replicator.local_state()
        for counts in self.counts:
            counts.catch_up(math.inf)
        if any(counts.changed_apart for counts in self.counts):
            self._decide(step, math.inf)

    def verify(
        self,
        replicators: Sequence[Replicator],
        step: int,
        options: Mapping[str, str],
        frozen: Mapping[str, Tensor],
    ) -> None:
        """Compares the tensors that must be equal on all replicas after `step` steps. If tensors
        differ, repairs them or raises `Desync`, as `Safety` says. Collective.

        Args:
            options: Options of the parameter groups, which must also be equal; see `options_of`.
            frozen: Weights that no step changes, by name, which must also be equal.
        """
        self.look()
        self._drain(replicators, step)
        compared: set[Link] = set()
        for replicator in replicators:
            tensors = replicator.replicated()
            texts: Mapping[str, str] = {}
            others: dict[str, Tensor] = {}
            if replicator.link not in compared:
                texts = options
                others = replicator.part_of(frozen)
            compared.add(replicator.link)
            mended = self._mended(replicator, tensors, others, texts, step)
            for name in others.keys() & mended.keys():
                others[name].copy_(mended.pop(name))
            if mended:  # `repair` may replace nonfinite weights even if it gets no tensors
                replicator.repair(mended)
            replicator.counts.due.add(step - 1)
        self._decide(step, step - 1)

    def _mended(
        self,
        replicator: Replicator,
        tensors: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        texts: Mapping[str, str],
        step: int,
    ) -> dict[str, Tensor]:
        """Compares `tensors`, `others` and `texts` of this replica with those of other replicas.
        The ranks of a node may hold different shards of `others`. Collective.

        Returns repaired values of the tensors that differ, by name. No tensor is repaired unless
        `on_desync` is "repair". Each difference that is not repaired becomes a reason to stop. If a
        replica announces that it began or stopped training a parameter, records the announcement.
        """
        link = replicator.link
        counts = replicator.counts
        mended: dict[str, Tensor] = {}
        compared = {**others, **tensors}
        for difference in self.compare(link, compared, self.runtime.device, texts):
            name = difference.name
            if name == CHANGE:
                for sender in difference.odd:
                    counts.announced(sender, counts.names[difference.source])
                continue
            if self.safety.on_desync == "repair" and name in compared:
                mended[name] = repaired(
                    link, difference, compared[name], self.runtime.device, name in others
                )
                outcome = "repaired"
            else:
                counts.desync(difference.odd[0], name)
                outcome = "all replicas stop"
            if link.replica in (0, *difference.odd):
                _log.warning("after step %d %s: %s", step, difference, outcome)
        return mended

    def _decide(self, step: int, until: float) -> None:
        self._raise_asked()
        if self._arrived(until):
            self._settle(step)

    def _settle(self, step: int) -> None:
        """Raises an error on all ranks if any rank has a reason to stop. The error gives the most
        serious reason of all ranks, and `step`. Collective."""
        fatal = self._gravest_known()
        if self._others:
            fatal = int(self._gravest_anywhere(fatal))
        if fatal:
            self._raise(fatal, step)

    def _arrived(self, until: float) -> bool:
        """Counts the faults of new messages. A message is new if it was due at a step up to `until`
        and no earlier call has checked it. Returns True if there were new messages. All ranks get
        the same answer.
        """
        found = False
        for counts in self.counts:
            if counts.reports:
                counts.catch_up(until)
            due = {step for step in counts.due if step <= until}
            counts.due -= due
            if counts.changed:
                counts.stop_if_apart()
            found |= bool(due)
        return found

    def _gravest_known(self) -> int:
        return max(counts.fatal << 4 | counts.number for counts in self.counts)

    def _gravest_anywhere(self, fatal: int) -> Tensor:
        """Exchanges the ranks' reasons to stop, and returns the code of the most serious reason; 0
        if no rank has a reason. Collective.

        Shapes: -> `[1]` int64.
        """
        gravest = torch.full((1,), fatal, dtype=torch.int64, device=self.runtime.device)
        for link in self._others:
            gravest = link.collect(gravest, apart=True).amax().view(1)
        return gravest

    def _raise_asked(self) -> None:
        """Raises the error for an earlier step, if the ranks have exchanged their reasons to stop
        for that step and any rank had a reason.
        """
        if self._asked:
            readback, step = self._asked
            self._asked = None
            (fatal,) = readback.read()
            self._raise(fatal, step)

    def _raise(self, fatal: int, step: int) -> None:
        if fatal >> 4:
            counts = next(each for each in self.counts if each.number == fatal & 15)
            raise counts.error(fatal >> 4, step)
