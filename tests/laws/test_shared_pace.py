"""The law of pace: the shards of a newcomer load the same copies and apply the same steps, whichever of their
connections is lost, because both are collective over the shards."""

import random
from collections import deque
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from detonation.feed.pace import BEFORE_COPY, SharedPace

SHARDS = 3
LOSSES = 4


class Feed:
    """Gives all shards a copy of the same step once all ask for one, then each later step."""

    def __init__(self):
        self.step = 0
        self.shards = []

    def take_step(self):
        self.step += 1
        asking = [shard for shard in self.shards if not shard.is_connected and not shard.is_lost]
        if len(asking) == SHARDS:
            for shard in asking:
                shard.is_connected = True
        for shard in self.shards:
            if shard.is_connected:
                shard.inbox.append((self.step, 0))


class Shard:
    """A shard of a newcomer. `applied` has what its collectives were for: (copy, point)."""

    def __init__(self, store, number):
        member = SimpleNamespace(store=store, replica=7, shard=number, shards=SHARDS)
        self.pace = SharedPace(member)
        self.applied = []
        self.ask()

    def ask(self):
        self.inbox = deque()
        self.is_connected = False
        self.is_lost = False
        self.received = BEFORE_COPY

    def lose(self):
        if self.is_connected:
            self.is_connected = False
            self.is_lost = True

    def turn(self):
        if self.is_lost:
            self.pace.close()
        if self.inbox:
            self.received = self.inbox[-1]
        self.pace.exchange(self.received)
        while self.inbox and self.inbox[0] <= self.pace.limit:
            self.applied.append((self.pace.copy, self.inbox.popleft()))
        if self.pace.is_over:
            self.pace.next_copy()
            self.ask()


def tried(seed):
    draw = random.Random(seed)
    feed, store = Feed(), HashStore()
    shards = feed.shards = [Shard(store, number) for number in range(SHARDS)]
    losses = draw.randint(0, LOSSES)
    for _ in range(400):
        shard = draw.choice(shards)
        if losses and shard.is_connected and draw.random() < 0.02:
            losses -= 1
            shard.lose()
        elif draw.random() < 0.2:
            feed.take_step()
        else:
            shard.turn()
        longest = max((shard.applied for shard in shards), key=len)
        assert all(shard.applied == longest[: len(shard.applied)] for shard in shards)
    for _ in range(6):  # rounds without a loss
        feed.take_step()
        for shard in shards * 2:
            shard.turn()
    return feed, shards


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_all_shards_apply_the_same_copies_and_steps_and_come_to_the_last_step(first):
    copies = set()
    for seed in range(first, first + 50):
        feed, shards = tried(seed)
        assert all(shard.applied == shards[0].applied for shard in shards)
        copy, point = shards[0].applied[-1]
        assert point == (feed.step, 0)
        copies.add(copy)
    assert copies >= {0, 1, 2}  # of a run without a loss, with one, with two
