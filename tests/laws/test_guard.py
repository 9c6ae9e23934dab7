"""Messages that are not what they must be: none is used, nothing ends, the sender is named, all decide alike."""

import math
from collections import Counter
from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import detonation as dt
from detonation.core.codec.aggregate import Mean
from detonation.core.codec.indices import IndexCoding, PackedIndices
from detonation.core.codec.message_rows import MessageRows, joined
from detonation.core.codec.precision import PRECISIONS
from detonation.core.codec.received import Arrived
from detonation.core.compute import checksum as summing
from detonation.core.compute import kernel_library
from detonation.core.compute.nonfinite import LIMIT, SIGNAL_LIMIT, inspected
from detonation.core.integrity.fault_counts import (
    IN_A_ROW,
    STRIKES,
    BadPeer,
    Desync,
    FaultCounts,
    NonFiniteGradient,
)
from detonation.core.integrity.guard import Expected, Guard, decide_usable, explain_faults
from detonation.core.integrity.message import HEADER_BYTES, IDENTITY, Header, Message, hash63
from detonation.core.runtime import Runtime
from payloads import (
    CLASSES,
    REPLICAS,
    ROWS,
    SCHEMES,
    STEP,
    Seen,
    fuzz,
    guard,
    honest,
    line_of,
    opened,
    parts_of,
    sealed,
)


def test_of_a_thousand_bad_messages_none_is_used_and_each_sender_is_named():
    results = fuzz(seed=0, count=28 * len(CLASSES))
    assert len(results) >= 20 and sum(result.tried for result in results.values()) >= 1000
    for name, result in results.items():
        assert (result.refused, result.applied) == (28, 0), (name, result)


def test_a_guard_that_reports_late_uses_none_either_and_names_the_same_for_the_same_reasons():
    count = len(SCHEMES) * len(CLASSES)
    assert fuzz(seed=0, count=count, late=True) == fuzz(seed=0, count=count)


def test_what_tensors_decide_on_messages_is_what_the_host_explains():
    """On tables of what is found in messages, of which any word may be one that is nearly right."""
    random = Random(0)
    expected = Expected(Header(11, STEP, 5, 0), nbytes=100, parameters=3, signals=True)
    outcomes = Counter()
    for _ in range(3000):
        norms = [
            random.choice([0.0, 1e-3, 1.0, 1001.0, LIMIT]) for _ in range(random.randint(1, 5))
        ]
        rows = [
            [IDENTITY, 11, STEP, r << 32 | 5, 100, 0, 77, 9, 9, 0, n] for r, n in enumerate(norms)
        ]
        for row in rows:
            if random.random() < 0.4:
                at = random.randrange(11)
                wrong = {9: [1, 2, 3], 10: [math.nan, math.inf, -0.0, 1.01 * LIMIT]}
                row[at] = random.choice(
                    wrong.get(at)
                    or [0, 1, 3, 4, -1, row[at] + 1, row[at] ^ 1 << random.randrange(63)]
                )
        expected = replace(expected, signals=random.random() < 0.8)
        usual = random.choice([0.0, 1e-3, 1.0])
        refused, table = decide_usable(*facts(rows), expected, torch.tensor([usual]))
        found = explain_faults(table.tolist(), expected)
        assert refused.tolist() == [bool(fault) for fault in found], rows
        assert (refused == table[:, -1]).all()
        outcomes.update(fault[:12] for fault in found)
    assert len(outcomes) >= 14 and outcomes[""] > 1000


def facts(rows):
    """What was found in messages: header, checksum, fault of the content and norm of each."""
    words, norms = torch.tensor([row[:-1] for row in rows]), torch.tensor([row[-1] for row in rows])
    return words[:, :8], words[:, 8], words[:, 9], norms


@pytest.mark.parametrize("name", SCHEMES)
def test_honest_messages_are_used_as_they_are(name):
    said, shared = honest(name)
    ledger = Seen(0)
    messages = [said[r, STEP] for r in range(REPLICAS)]
    received = opened(SCHEMES[name], guard(SCHEMES[name], 0, ledger), messages, shared, STEP)
    codec = SCHEMES[name].codec
    for replica, values in enumerate(received.whole().values):
        sent = codec.precision.decode(said[replica, STEP][1], len(values), codec.selection.k)
        assert torch.equal(values, sent) and sent.any()
    assert (ledger.refused, ledger.skipped, ledger.fatal) == (0, 0, 0)


def plain_checksum(octets):
    """A sum of words of 32 bits; of their sums by lines of 1024 words, and by columns."""
    octets += bytes(-len(octets) % 4096)
    words = [int.from_bytes(octets[at : at + 4], "little") for at in range(0, len(octets), 4)]
    lines = [words[at : at + 1024] for at in range(0, len(words), 1024)]

    def number(place):
        mixed = (place + 1) * 0x9E3779B97F4A7C15 % 2**64
        return mixed ^ mixed >> 32

    def signed(total, bits):
        return (total + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)

    total = sum(signed(sum(line), 32) * (number(1024 + i) & ~1) for i, line in enumerate(lines))
    total += sum(
        signed(sum(column), 32) * (number(i) | 1)
        for i, column in enumerate(zip(*lines, strict=True))
    )
    return signed(total, 64)


@given(st.binary(min_size=1, max_size=40), st.integers(1, 5000))
def test_the_checksum_is_its_definition(content, length):
    octets = (content * -(-length // len(content)))[:length]
    line = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    assert int(summing.checksum(line)) == plain_checksum(octets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_the_checksum_is_the_same_compiled_or_not(dtype, monkeypatch):
    part = torch.randint(0, 100, (20_001,)).to(dtype)
    tensors = [part, part[1:], part[:0], part[:1]]
    compiled = [int(summing.checksum(tensor)) for tensor in tensors]
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    assert compiled == [int(summing.checksum(tensor)) for tensor in tensors]


def test_the_checksum_finds_each_changed_word_and_each_moved_line():
    message = torch.randint(
        0, 256, (3 * 4096 + 100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    right = summing.checksum(message)
    changed = message.repeat(1000, 1)
    places = torch.randperm(len(message), generator=torch.Generator().manual_seed(1))[:1000]
    changed[torch.arange(1000), places] += 1 + torch.arange(1000, dtype=torch.int64).remainder(
        255
    ).to(torch.uint8)
    assert (summing.checksums(changed) != right).all()
    assert len({int(summing.checksum(message.roll(4 * words))) for words in range(1500)}) == 1500
    lines = message[: 3 * 4096].view(3, 4096)
    assert len({int(summing.checksum(lines[list(order)])) for order in permutations(range(3))}) == 6


@pytest.mark.parametrize(
    "indices",
    [
        IndexCoding(10, 4),
        IndexCoding(64, 4),
        IndexCoding(1000, 3),
        IndexCoding(16, 9),
        IndexCoding(10, 5),
    ],
)
def test_indices_that_no_encoder_makes_are_found_compiled_or_not(indices, monkeypatch):
    rows = 4096
    right = torch.rand(rows, indices.chunk).argsort(1)[:, : indices.k].sort(1).values
    twice, outside, falling = right.clone(), right.clone(), right.clone()
    twice[rows // 2, 0] = twice[rows // 2, 1]
    falling[rows - 1] = falling[rows - 1].flip(0)
    outside[7] = 2**indices.width - 1
    found = []
    for found_library in (kernel_library.load_library(), None):
        cases = [right, twice] if indices.bitmap else [right, twice, falling, outside]
        packed = torch.stack([indices.encode(case) for case in cases])
        monkeypatch.setattr(kernel_library, "load_library", lambda found=found_library: found)
        found.append(indices.faults(PackedIndices(indices, packed, rows)).tolist())
        monkeypatch.undo()
    last = (
        1 if indices.chunk < 2**indices.width else 2
    )  # the largest number that the bits hold is an index, twice
    assert found[0] == found[1] == [0, 2, 2, last][: len(found[0])]


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e15])
def test_what_an_encoder_makes_is_lawful(name, scale):
    values = torch.randn(300, 7) * scale
    values[0], values[1] = values[0].abs(), 0
    lawful, norm = PRECISIONS[name].check(PRECISIONS[name].encode(values), 300, 7)
    assert lawful is not False and norm.isfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, -1.1 * SIGNAL_LIMIT])
@pytest.mark.parametrize("size", [10, 10_000], ids=["plain", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_signal_that_must_not_reach_the_memory_is_found(value, size, dtype, late):
    runtime = Runtime(torch.device("cpu"))
    vars(runtime)["decides_on_device"] = late
    ones = torch.ones(size, dtype=dtype)
    signals = [
        None,
        torch.full((size,), -SIGNAL_LIMIT / 2, dtype=dtype),
        torch.zeros(0),
        ones,
        torch.tensor(0.0),
        ones.clone(),
    ]
    assert inspected(signals, runtime).status == 0 and inspected([None], runtime).status == 0
    signals[5][size // 2] = value
    assert inspected(signals, runtime).status == 6
    ones[size // 2] = value
    assert inspected(signals, runtime).status == 4


def test_a_change_of_some_replicas_is_named_by_what_the_first_of_them_changed():
    counts = FaultCounts(["a", "b"], 0)
    counts.changing = 3
    counts.announced(2, "b")
    counts.announced(1, "a")
    counts.stop_if_apart()
    assert "replicas 1, 2 began or ceased to train a," in str(counts.error(counts.fatal, 7))


def test_who_tells_nothing_counts_as_zeros_and_skips_are_counted():
    said, _ = honest("list")
    ledger = FaultCounts(["w"], 0, "skip")
    codec = SCHEMES["list"].codec
    for time in range(IN_A_ROW + 1):
        assert ledger.fatal == 0
        messages = [said[r, STEP] for r in range(REPLICAS)]
        stamp = Header(hash63("a schema"), STEP, 0, 2, status=1)
        empty = codec.encode(codec.empty(ROWS, STEP, 0, torch.device("cpu")))
        messages[2] = sealed(stamp, parts_of(codec, empty))
        received = opened(
            SCHEMES["list"], guard(SCHEMES["list"], 0, ledger), messages, None, STEP
        ).whole()
        assert not received.values[2].any() and received.values[1].any()
        assert (received.indices.unpacked < codec.selection.chunk).all()
        assert (ledger.skipped, ledger.refused) == (time + 1, 0)
    error = ledger.error(ledger.fatal, STEP)
    assert isinstance(error, NonFiniteGradient)
    text = "the gradient of w is not finite on replica 2 at step 7 for the 11th time in a row: lower lr, or clip"
    assert str(error) == text


@pytest.mark.parametrize(("count", "status"), [(2, 2), (70_000, 66_000), (300_000, 299_999)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_of_messages_of_one_place_and_step(count, status, dtype):
    def guard_of(place, counts, replica, schema="a schema"):
        return Guard([f"w{n}" for n in range(count)], schema, place, replica, 0, counts)

    def sealed_by(guards, step=STEP):
        total = torch.zeros(9, dtype=dtype)
        for replica, each in enumerate(guards):
            digits = torch.zeros(9, dtype=dtype)
            each.seal_sum(digits, status if replica == 1 else 0, step + 9 * (each is late))
            total += digits
        return total

    counts, late, values = FaultCounts(["w"], 0, "skip"), None, [torch.ones(4)]
    right = [guard_of(5, counts, replica) for replica in range(3)]
    assert right[0].open_sum(values, sealed_by(right), STEP)
    assert (counts.skipped, counts.by_parameter[f"w{status - 1}"], counts.fatal) == (1, 1, 0)
    gone = sealed_by(right)
    gone[6:] = 0
    assert right[0].open_sum(values, gone, STEP, absent=[2]) and not counts.fatal
    late = right[2]
    others = [late, guard_of(6, counts, 2), guard_of(5, counts, 2, "another")]
    for digits in [gone, *(sealed_by([*right[:2], other]) for other in others)]:
        counts = right[0]._counts = FaultCounts(["w"], 0, "skip")
        assert not right[0].open_sum(values, digits, STEP)
        error = counts.error(counts.fatal, STEP)
        assert isinstance(error, Desync) and str(error).startswith(
            "replica 2 added a message of another step, level or"
        )


def test_three_strikes_stop_all_and_name_the_sender():
    ledger = FaultCounts(["w"], 0)
    for step in range(STRIKES):
        assert ledger.fatal == 0
        ledger.refuse(1, "does not add up", step)
    error = ledger.error(ledger.fatal, 2)
    assert isinstance(
        error, BadPeer
    ) and "3 messages of replica 1 were refused, the last at step 2" in str(error)


def sealed_by(scheme, guard, content, step):
    octets = joined([[line_of(content)[None]]], HEADER_BYTES)
    run = MessageRows(scheme.codec, ROWS, lambda: octets, room=HEADER_BYTES)
    guard.seal(Message(step, scheme.codec, waiting=run), 0)
    return [octets[0, :HEADER_BYTES].clone().view(torch.int64), *content]


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_message_that_was_damaged_for_one_only_shows_with_the_next(late):
    """Replica 2 receives something else from 1 than the others do: they cannot know, until it says what it heard."""
    said, _ = honest("list")
    scheme, ledgers = SCHEMES["list"], [Seen(r) for r in range(REPLICAS)]
    guards = [guard(scheme, r, ledgers[r], late) for r in range(REPLICAS)]
    messages = [sealed_by(scheme, guards[r], said[r, STEP][1:], STEP) for r in range(REPLICAS)]
    for r in range(REPLICAS):
        arrived = [list(parts) for parts in messages]
        if r == 2:
            arrived[1][1] = arrived[1][1] + 1
        opened(scheme, guards[r], arrived, None, STEP)
        ledgers[r].catch_up(math.inf)
    assert [ledger.refused for ledger in ledgers] == [0, 0, 1]
    following = [sealed_by(scheme, guards[r], said[r, STEP][1:], STEP + 1) for r in range(REPLICAS)]
    for r in range(REPLICAS):
        opened(scheme, guards[r], following, None, STEP + 1)
        ledgers[r].catch_up(math.inf)
    error = ledgers[0].error(ledgers[0].fatal, STEP + 1)
    assert isinstance(error, Desync) and "replica 2" in str(error)
    assert {ledger.fatal for ledger in ledgers} == {ledgers[0].fatal}


def test_messages_of_no_rows_are_lawful_and_read_as_nothing(monkeypatch):
    """A shard may hold nothing of the first parameters, and its messages may have an odd size."""
    codec = dt.demo(topk=4, chunk=8, precision="bf16", tiles=True).codec
    messages = torch.zeros(2, 65 + codec.nbytes(1), dtype=torch.uint8)[:, 65:]
    arrived = Arrived(codec, messages, 1, None, Mean())
    assert arrived.values(0, 0).shape == (2, 0, 4) and arrived.values(0, 1).shape == (2, 1, 4)
    marked = IndexCoding(16, 9)
    assert marked.bitmap
    for library in (kernel_library.load_library(), None):
        monkeypatch.setattr(kernel_library, "load_library", lambda found=library: found)
        assert marked.faults(
            PackedIndices(marked, torch.zeros(2, 0, dtype=torch.uint8), 0)
        ).tolist() == [0, 0]
