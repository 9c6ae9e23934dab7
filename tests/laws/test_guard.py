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

from detonation.core.codec.indices import IndexCoding, PackedIndices
from detonation.core.codec.precision import PRECISIONS
from detonation.core.compute import checksum as summing
from detonation.core.compute import kernel_library
from detonation.core.compute.nonfinite import LIMIT, first_nonfinite
from detonation.core.integrity import header, validate
from detonation.core.integrity.fault_counts import IN_A_ROW, STRIKES, BadPeer, Desync, FaultCounts, NonFiniteGradient
from detonation.core.integrity.guard import hash63
from detonation.core.integrity.validate import Expected, explain_faults
from detonation.core.runtime import Runtime
from detonation.kernels import native
from payloads import CLASSES, REPLICAS, SCHEMES, STEP, Seen, fuzz, guard, honest, opened


def test_of_a_thousand_bad_messages_none_is_used_and_each_sender_is_named():
    results = fuzz(seed=0, count=28 * len(CLASSES))
    assert len(results) >= 20 and sum(result.tried for result in results.values()) >= 1000
    for name, result in results.items():
        assert (result.refused, result.applied) == (28, 0), (name, result)


def test_a_guard_that_reports_late_uses_none_either_and_names_the_same_for_the_same_reasons():
    count = len(SCHEMES) * len(CLASSES)
    assert fuzz(seed=0, count=count, late=True) == fuzz(seed=0, count=count)


def test_what_tensors_decide_on_messages_is_what_the_host_explains(monkeypatch):
    """On tables of what is found in messages, of which any word may be one that is nearly right."""
    random = Random(0)
    expected = Expected(header.Header(11, STEP, 5, 0), nbytes=100, parameters=3, signals=True)
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
        found = explain_faults([[*row, bits(0.0), 0] for row in rows], expected)
        used = [not fault and not row[5] for row, fault in zip(rows, found, strict=True)]
        assert decided(rows, expected, monkeypatch) == used, rows
        outcomes.update(fault[:12] for fault in found)
    assert len(outcomes) >= 14 and outcomes[""] > 1000


def decided(rows, expected, monkeypatch):
    """Which of the messages may be used, by a table of their words and of what was found in them."""
    monkeypatch.setattr(validate, "checksums", lambda _: torch.tensor([row[8] for row in rows]))
    messages = [[torch.tensor(row[:8])] for row in rows]
    content, usual = torch.tensor([row[9:] for row in rows]), torch.zeros(1, dtype=torch.float64)
    return [bool(row[-1]) for row in validate.decide_usable(messages, content, expected, usual)]


def bits(value):
    return struct.unpack("q", struct.pack("d", value))[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_honest_messages_are_used_as_they_are(name):
    said, shared = honest(name)
    ledger = Seen(0)
    messages = [said[r, STEP] for r in range(REPLICAS)]
    received = opened(SCHEMES[name], guard(SCHEMES[name], 0, ledger), messages, shared, STEP)
    codec = SCHEMES[name].codec
    for replica, values in enumerate(received.values):
        sent = codec.precision.decode(said[replica, STEP][1], len(values), codec.selection.k)
        assert torch.equal(values, sent) and sent.any()
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
    assert int(summing.checksum(parts)) == plain_checksum(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_the_checksum_is_the_same_compiled_or_not(dtype):
    part = torch.randint(0, 100, (20_001,)).to(dtype)
    if native.load_library():
        assert native.load_library().checksums([[part]], [7])[0] == int(summing._summed([part], 7))
    assert int(summing._summed([part[1:].clone()], 0)) == int(summing._summed([part[1:]], 0))


@pytest.mark.parametrize(
    "indices", [IndexCoding(10, 4), IndexCoding(64, 4), IndexCoding(1000, 3), IndexCoding(16, 9), IndexCoding(10, 5)]
)
def test_indices_that_no_encoder_makes_are_found_compiled_or_not(indices, monkeypatch):
    rows = 4096
    right = torch.rand(rows, indices.chunk).argsort(1)[:, : indices.k].sort(1).values
    twice, outside, falling = right.clone(), right.clone(), right.clone()
    twice[rows // 2, 0] = twice[rows // 2, 1]
    falling[rows - 1] = falling[rows - 1].flip(0)
    outside[7, 0] = 2**indices.width - 1
    found = []
    for found_library in (kernel_library.load_library(), None):
        cases = indices.encode([right, twice])
        if not indices.bitmap:
            cases += indices.encode([falling])
        if not indices.bitmap and indices.chunk < 2**indices.width:
            cases += indices.encode([outside])
        monkeypatch.setattr(kernel_library, "load_library", lambda found=found_library: found)
        found.append(indices.faults([PackedIndices(indices, case, rows) for case in cases]).tolist())
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
    runtime = Runtime(torch.device("cpu"))
    vars(runtime)["decides_on_device"] = late
    ones = torch.ones(size, dtype=dtype)
    signals = [
        None,
        torch.full((size,), -LIMIT / 2, dtype=dtype),
        torch.zeros(0),
        ones,
        torch.tensor(0.0),
        ones.clone(),
    ]
    assert first_nonfinite(signals, runtime) == 0 and first_nonfinite([None], runtime) == 0
    signals[5][size // 2] = value
    assert first_nonfinite(signals, runtime) == 6
    ones[size // 2] = value
    assert first_nonfinite(signals, runtime) == 4


def test_who_tells_nothing_counts_as_zeros_and_skips_are_counted():
    said, _ = honest("list")
    ledger = FaultCounts(["w"], 0, "skip")
    codec = SCHEMES["list"].codec
    for time in range(IN_A_ROW + 1):
        assert ledger.fatal == 0
        messages = [said[r, STEP] for r in range(REPLICAS)]
        stamp = header.Header(hash63("a schema"), STEP, 0, 2, status=1)
        messages[2] = list(stamp.sealed([messages[2][1:]])[0])
        received = opened(SCHEMES["list"], guard(SCHEMES["list"], 0, ledger), messages, None, STEP)
        assert not received.values[2].any() and received.values[1].any()
        assert (received.indices[2].unpacked < codec.selection.chunk).all()
        assert (ledger.skipped, ledger.refused) == (time + 1, 0)
    error = ledger.error(ledger.fatal, STEP)
    assert isinstance(error, NonFiniteGradient)
    assert str(error) == "the gradient of w is not finite on replica 2 at step 7 for the 11th time in a row"


def test_three_strikes_stop_all_and_name_the_sender():
    ledger = FaultCounts(["w"], 0)
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
    messages = [guards[r].seal([said[r, STEP][1:]], STEP, 0)[0] for r in range(REPLICAS)]
    for r in range(REPLICAS):
        arrived = [list(parts) for parts in messages]
        if r == 2:
            arrived[1][1] = arrived[1][1] + 1
        opened(scheme, guards[r], arrived, None, STEP)
        ledgers[r].catch_up(math.inf)
    assert [ledger.refused for ledger in ledgers] == [0, 0, 1]
    following = [guards[r].seal([said[r, STEP][1:]], STEP + 1, 0)[0] for r in range(REPLICAS)]
    for r in range(REPLICAS):
        opened(scheme, guards[r], following, None, STEP + 1)
        ledgers[r].catch_up(math.inf)
    error = ledgers[0].error(ledgers[0].fatal, STEP + 1)
    assert isinstance(error, Desync) and "replica 2" in str(error)
    assert {ledger.fatal for ledger in ledgers} == {ledgers[0].fatal}
