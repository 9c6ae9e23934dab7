"""What the search of the model has found, on the real axis: replicas as threads of one process."""

import threading
from types import SimpleNamespace

import torch

from detonation.cluster.survive.agreement import axis_key
from limits import LIMIT_S, until
from steps import Died, replicas


def await_members(axis, members):
    """Notices each loss at once, and waits until this rank has recovered, and these are the members."""
    membership = axis._membership

    def recovered():
        with axis._changed:  # no agreement may be adopted between the two
            if membership.some_left():
                membership.call()
        return membership.members == members and not axis._recovering

    until(recovered)


def test_a_later_agreement_replaces_an_earlier_one_that_is_due_later():
    """Replica 0 has begun a step when 1 is lost, so 0 and 2 adopt that after the step; then it is
    lost, too, and 2 adopts both losses before the step: replica 0 must not come back after it."""
    begun, seen = threading.Event(), threading.Event()

    def act(axis):
        user = axis.for_one()
        if axis.replica == 1:
            assert begun.wait(LIMIT_S)
            raise Died
        if axis.replica == 0:
            assert not user.enter_step(0)
            begun.set()
        await_members(axis, [0, 2])
        if axis.replica == 0:
            assert seen.wait(LIMIT_S)
            raise Died
        seen.set()
        await_members(axis, [2])
        sizes = []
        for step in range(3):
            if user.enter_step(step):
                user.adopt(step)
            sizes.append(user.size())
        return sizes

    assert replicas(act)[2] == [1, 1, 1]


def test_a_rank_that_agrees_twice_adopts_a_loss_before_the_turn_that_another_has_begun():
    """Replica 2 is lost. 0 recovers, and begins a step without it; 1 has to agree once more then."""
    ready, begun = threading.Event(), threading.Event()

    def act(axis):
        user = axis.for_one()
        if axis.replica == 2:
            assert ready.wait(LIMIT_S)
            raise Died
        if axis.replica == 1:
            catch_up = axis._catch_up

            def interrupted(agreement):
                if agreement.epoch > 1:
                    return catch_up(agreement)
                assert begun.wait(LIMIT_S)
                return False

            axis._catch_up = interrupted
            ready.set()
        await_members(axis, [0, 1])
        assert user.enter_step(0)
        user.adopt(0)
        begun.set()
        return user.size()

    assert replicas(act)[:2] == [2, 2]


def test_a_replica_that_is_done_still_gives_its_last_result_to_the_others():
    """Replica 0 has its last result and closes; 1 dies, and the connection of 2 breaks before it
    has that result."""

    def act(axis):
        arriving = axis.all_gather(torch.full((2,), axis.replica + 1.0))
        if axis.replica == 2:
            with axis._changed:
                axis._kept[1].flight = SimpleNamespace(ended=True, good=False)
            store = axis._membership.store
            until(lambda: any(store.check([axis_key(key, 0)]) for key in ("end", "left")))
        result = arriving()
        if axis.replica == 1:
            raise Died
        return result

    first, _, last = replicas(act)
    assert torch.equal(first, last), "the last step of two replicas has different members"
