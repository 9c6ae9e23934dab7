"""Messages that are not what they must be: none is used, nothing ends, the sender is named, all decide alike."""

import math
import struct
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import detonation as dt
from detonation.core.codec.codec import Message
from detonation.core.codec.indices import Columns, Packed
from detonation.core.codec.precision import PRECISIONS
from detonation.core.integrity import header
from detonation.core.integrity.fault_counts import IN_A_ROW, STRIKES, BadPeer, Drift, Ledger, NonFiniteGradient
from detonation.core.integrity.nonfinite import LIMIT
from detonation.core.integrity.validate import Expected, Inspected, faults, usable
from detonation.kernels import native
from payloads import CLASSES, REPLICAS, ROWS, SCHEMES, STEP, Seen, fuzz, guard, honest


def test_of_a_thousand_bad_messages_none_is_used_and_each_sender_is_named():
    results = fuzz(seed=0, count=28 * len(CLASSES))
    assert len(results) >= 20 and sum(result.tried for result in results.values()) >= 1000
    for name, result in results.items():
        assert (result.refused, result.applied) == (28, 0), (name, result)


def test_a_guard_that_reports_late_uses_none_either_and_names_the_same_for_the_same_reasons():
    count = len(SCHEMES) * len(CLASSES)
    assert fuzz(seed=0, count=count, late=True) == fuzz(seed=0, count=count)


def test_what_a_device_decides_on_messages_is_what_the_host_does():
    """On tables of what is found in messages, of which any word may be one that is nearly right."""
    random = Random(0)
    expected = Expected(header.Stamp(11, STEP, 5, 0), nbytes=100, parameters=3, signals=True)
    identity = header.MAGIC | header.VERSION << 56
    outcomes = Counter()
    for _ in range(3000):
        norms = [random.choice([0.0, 1e-3, 1.0, 1001.0, LIMIT]) for _ in range(random.randint(1, 5))]
        rows = [[identity, 11, STEP, r << 32 | 5, 100, 0, 77, 9, 9, 0, 1, bits(n)] for r, n in enumerate(norms)]
        for row in rows:
            if random.random() < 0.4:
                at = random.randrange(12)
                wrong = {9: [1, 2], 10: [0], 11: [bits(n) for n in (math.nan, math.inf, -0.0, 1.01 * LIMIT)]}
                row[at] = random.choice(
                    wrong.get(at, [0, 1, 3, 4, -1, row[at] + 1, row[at] ^ 1 << random.randrange(63)])
                )
        expected = replace(expected, signals=random.random() < 0.8)
        table = [Inspected.of(row) for row in rows]
        found = faults(table, expected)
        used = [not fault and not each.header.status for each, fault in zip(table, found, strict=True)]
        assert usable(torch.tensor(rows), expected).tolist() == used, rows
        outcomes.update(fault[:12] for fault in found)
    assert len(outcomes) >= 14 and outcomes[""] > 1000


def bits(value):
    return struct.unpack("q", struct.pack("d", value))[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_honest_messages_are_used_as_they_are(name):
    said, shared = honest(name)
    ledger = Seen(0)
    opened = guard(SCHEMES[name], 0, ledger).open([said[r, STEP] for r in range(REPLICAS)], ROWS, [shared] * 3, STEP)
    codec = SCHEMES[name].codec
    for replica, values in enumerate(opened.values):
        told = codec.precision.decode(said[replica, STEP][1], ROWS, codec.selection.kept)
        assert torch.equal(values, told) and told.any()
    assert (ledger.refused, ledger.skipped, ledger.fatal) == (0, 0, 0)


def plain_checksum(parts):
    total, place = 0, 0
    for part in parts:
        octets = bytes(part.view(-1).view(torch.uint8).tolist())
        for at in range(0, len(octets), 4):
            place += 1
            mixed = place * 0x9E3779B97F4A7C15 % 2**64
            total += int.from_bytes(octets[at : at + 4], "little") * ((mixed ^ mixed >> 32) | 1)
    return (total + 2**63) % 2**64 - 2**63


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3))
def test_the_checksum_is_its_definition(contents):
    parts = [torch.tensor(list(content), dtype=torch.uint8) for content in contents]
    assert int(header.checksum(parts)) == plain_checksum(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_the_checksum_is_the_same_compiled_or_not(dtype):
    part = torch.randint(0, 100, (20_001,)).to(dtype)
    if native.load():
        assert native.load().checksum(part, 7) == int(header._summed([part], 7))
    assert int(header._summed([part[1:].clone()], 0)) == int(header._summed([part[1:]], 0))


@pytest.mark.parametrize("columns", [Columns(10, 4), Columns(64, 4), Columns(1000, 3), Columns(16, 9), Columns(10, 5)])
def test_columns_that_no_encoder_makes_are_found_compiled_or_not(columns, monkeypatch):
    rows = 4096
    right = torch.rand(rows, columns.chunk).argsort(1)[:, : columns.kept].sort(1).values
    twice, outside, falling = right.clone(), right.clone(), right.clone()
    twice[rows // 2, 0] = twice[rows // 2, 1]
    falling[rows - 1] = falling[rows - 1].flip(0)
    outside[7, 0] = 2**columns.width - 1
    found = []
    for library in (native.load(), None):
        cases = [columns.encode(c) for c in (right, twice)]
        if not columns.bitmap:
            cases.append(columns.encode(falling))
        if not columns.bitmap and columns.chunk < 2**columns.width:
            cases.append(columns.encode(outside))
        monkeypatch.setattr(native, "load_for", lambda *_, library=library: library)
        found.append([int(Packed(columns, case, rows).fault()) for case in cases])
        monkeypatch.undo()
    assert found[0] == found[1] == [0, 2, 2, 1][: len(found[0])]


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e15])
def test_what_an_encoder_makes_is_lawful(name, scale):
    values = torch.randn(300, 7) * scale
    values[0], values[1] = values[0].abs(), 0
    assert PRECISIONS[name].lawful(PRECISIONS[name].encode(values), 300, 7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, -1.1 * LIMIT])
@pytest.mark.parametrize("size", [10, 10_000], ids=["plain", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_signal_that_must_not_reach_the_memory_is_found(value, size, dtype, late):
    this = guard(dt.full(), 0, late=late)
    ones = torch.ones(size, dtype=dtype)
    signals = [
        None,
        torch.full((size,), -LIMIT / 2, dtype=dtype),
        torch.zeros(0),
        ones,
        torch.tensor(0.0),
        ones.clone(),
    ]
    assert this.status(signals) == 0 and this.status([None]) == 0
    signals[5][size // 2] = value
    assert this.status(signals) == 6
    ones[size // 2] = value
    assert this.status(signals) == 4


def test_who_tells_nothing_counts_as_zeros_and_skips_are_counted():
    said, _ = honest("list")
    ledger = Ledger(["w"], 0, "skip")
    codec = SCHEMES["list"].codec
    for time in range(IN_A_ROW + 1):
        assert ledger.fatal == 0
        messages = [said[r, STEP] for r in range(REPLICAS)]
        stamp = header.Stamp(header.number("a schema"), STEP, 0, 2, status=1)
        messages[2] = list(header.sealed(messages[2][1:], stamp))
        opened = guard(SCHEMES["list"], 0, ledger).open(messages, ROWS, [None] * 3, STEP)
        assert not opened.values[2].any() and opened.values[1].any()
        assert torch.equal(opened.columns[2][0], torch.arange(codec.selection.kept))
        assert (ledger.skipped, ledger.refused) == (time + 1, 0)
    error = ledger.error(ledger.fatal, STEP)
    assert isinstance(error, NonFiniteGradient)
    assert str(error) == "the gradient of w is not finite on replica 2 at step 7 for the 11th time in a row"


def test_three_strikes_stop_all_and_name_the_sender():
    ledger = Ledger(["w"], 0)
    for step in range(STRIKES):
        assert ledger.fatal == 0
        ledger.refuse(1, "does not add up", step)
    error = ledger.error(ledger.fatal, 2)
    assert isinstance(error, BadPeer) and "3 messages of replica 1 were refused, the last at step 2" in str(error)


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_message_that_was_damaged_for_one_only_shows_with_the_next(late):
    """Replica 2 receives something else from 1 than the others do: they cannot know, until it says what it heard."""
    said, _ = honest("list")
    scheme, ledgers = SCHEMES["list"], [Seen(r) for r in range(REPLICAS)]
    guards = [guard(scheme, r, ledgers[r], late) for r in range(REPLICAS)]
    messages = [guards[r].seal(Message(*said[r, STEP][1:]), STEP, 0) for r in range(REPLICAS)]
    for r in range(REPLICAS):
        arrived = [list(parts) for parts in messages]
        if r == 2:
            arrived[1][1] = arrived[1][1] + 1
        guards[r].open(arrived, ROWS, [None] * REPLICAS, STEP)
        ledgers[r].catch_up(math.inf)
    assert [ledger.refused for ledger in ledgers] == [0, 0, 1]
    following = [guards[r].seal(Message(*said[r, STEP][1:]), STEP + 1, 0) for r in range(REPLICAS)]
    for r in range(REPLICAS):
        guards[r].open(following, ROWS, [None] * REPLICAS, STEP + 1)
        ledgers[r].catch_up(math.inf)
    error = ledgers[0].error(ledgers[0].fatal, STEP + 1)
    assert isinstance(error, Drift) and "replica 2" in str(error)
    assert {ledger.fatal for ledger in ledgers} == {ledgers[0].fatal}
