"""benchmarks/faults/spot.py: machines come and go by a trace, and nothing is lost without need."""

import json
import random
from types import SimpleNamespace

import pytest
from benchmarks.faults import spot
from benchmarks.faults.spot_machine import BATCH
from benchmarks.faults.spot_world import Conductor, Event, Line, Outcome, ordinary

from limits import LIMIT_S

pytestmark = pytest.mark.usefixtures("patient")

TRACE = [
    Event(0, 0, 2, 600),
    Event(600, 2, 3, 900),
    Event(900, 3, 2, 1800, noticed=True),
    Event(1800, 2, 1, 2100),
]
TRACE += [Event(2100, 1, 0, 2700), Event(2700, 0, 2, 3300), Event(3300, 2, 0, 3900, noticed=True)]
TRACE += [Event(3900, 0, 1, 4200)]


@pytest.mark.long  # no branch of its own
def test_machines_of_a_trace_come_and_go_and_what_stays_is_equal_and_complete(tmp_path):
    with Conductor(tmp_path, pace_s=0.0, limit_s=LIMIT_S) as conductor:
        found = [
            conductor.handle(event, random.Random(number)) for number, event in enumerate(TRACE)
        ]
        assert len(conductor._alive) == 1 and ordinary(conductor._alive) > 0
    kinds = [
        "start",
        "join",
        "notice",
        "kill",
        "kill, all gone",
        "start",
        "notice, all gone",
        "start",
    ]
    assert [each.kind for each in found] == kinds
    for each in found:
        assert not each.broken and not each.unequal and not each.forgotten, each
    assert [each.checked for each in found] == [
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
    ]  # of a killed machine nobody has the memory
    assert all(each.lost_steps <= 1 for each in found)  # between the ends of two machines
    assert [each.replayed > 0 for each in found] == [False] * 5 + [True, False, False]
    assert [each.saved_at for each in found] == [150, 750, 1350, 1950, 1950, 3150, 3300, 3300]
    assert all(machine.has_ended() for machine in conductor._alive)


@pytest.mark.long  # no branch of its own
def test_stores_go_with_their_machines_and_each_step_keeps_its_examples(tmp_path):
    """One of three stores may go; with the second all end, and who is there begins anew."""
    trace = [Event(0, 0, 3, 600), Event(600, 3, 2, 900), Event(900, 2, 1, 1200)]
    trace += [Event(1200, 1, 2, 1500), Event(1500, 2, 1, 1800, noticed=True)]
    with Conductor(tmp_path, pace_s=0.0, limit_s=LIMIT_S, stores=3) as conductor:
        found = [
            conductor.handle(event, random.Random(number)) for number, event in enumerate(trace)
        ]
    assert not any(each.broken or each.unequal or each.forgotten for each in found), found
    assert [each.stores for each in found[:4]] == [(3, 3), (2, 3), (1, 1), (1, 1)]
    assert [each.anew for each in found[:4]] == [False, False, True, False]
    assert all(each.whole for each in found) and found[0].short == found[3].short == 0
    assert found[-1].step > found[1].step > found[0].step


def test_examples_that_two_machines_or_none_computed_are_told(tmp_path):
    conductor, outcome = Conductor(tmp_path), Outcome("join", 0, 1, 2, 60)
    machine = SimpleNamespace(lines=[Line(0.0, 3, 2, "", range(0, 16), 0.5)])
    conductor._parts = {
        1: [range(0, 16), range(16, BATCH)],
        2: [range(0, 16)],
        3: [range(0, 20), range(16, BATCH)],
        4: [range(0, 16)],
    }
    conductor._judge_parts(outcome, [machine])
    assert outcome.whole == 1 and (outcome.step, outcome.loss) == (3, 0.5)
    assert [text[:6] for text in outcome.unequal] == ["step 2", "step 3"]
    assert list(conductor._parts) == [4]  # not all have taken it


def row(kind, at, before, after, until, **measured):
    zeros = {
        "stalled_s": 0.0,
        "longest_s": 0.0,
        "until_s": 0.0,
        "came_s": [],
        "broken": "",
        "lost_steps": 0,
    }
    zeros |= {"ordinary_s": 0.0, "replay_s": 0.0, "replay_step_s": 0.02}
    return (
        zeros
        | {"kind": kind, "at": at, "before": before, "after": after, "until": until}
        | measured
    )


ROWS = [
    row("start", 0, 0, 2, 900, until_s=4.0),
    row("join", 900, 2, 3, 1500, longest_s=1.0, came_s=[6.0]),
    row("kill", 1500, 3, 2, 2100, stalled_s=2.0),
    row("kill, all gone", 2100, 2, 0, 2700, ordinary_s=0.1, lost_steps=1),
    row("start", 2700, 0, 1, 3000, until_s=4.0, replay_s=1.0),
]
THERE = 2 * 900 + 3 * 600 + 2 * 600 + 300


def test_goodput_is_what_a_hand_computes():
    """Checkpoints are at 150, 750, 1350, 1950, 2550: the last machines lose 150 s, and the import takes 1 s."""
    idle = 2 * 5 + (2 * 1 + 7) + 2 * 2
    assert spot.elastic_goodput(ROWS, 1.0, 600.0, logs=False) == pytest.approx(
        (THERE, THERE - idle - 2 * 150 - 4)
    )
    # with the log two machines lose the step of 0.1 s that was under way and one more, and the next takes 1500 again
    with_log = idle + 2 * 0.1 * 2 + 5 + 150 / 0.1 * 0.02
    assert spot.elastic_goodput(ROWS, 1.0, 600.0, logs=True) == pytest.approx(
        (THERE, THERE - with_log)
    )
    restarts = 10 * (2 + 3 + 2 + 1)
    lost = {"join": 2 * 150, "kill": 3 * 150, "all": 2 * 150}
    assert spot.restart_goodput(ROWS, 10.0, 600.0, saves=False) == pytest.approx(
        (THERE, THERE - restarts - sum(lost.values()))
    )
    assert spot.restart_goodput(ROWS, 10.0, 600.0, saves=True) == pytest.approx(
        (THERE, THERE - restarts - lost["kill"] - lost["all"])
    )


def test_the_goodput_where_all_begin_anew_is_that_of_a_kill_of_all_and_a_start():
    rows = [ROWS[0], row("kill", 900, 2, 1, 1500, until_s=4.0, lost_steps=1, anew=True)]
    rows[1]["ordinary_s"] = 0.1
    again = 150 / 0.1 * 0.02
    assert spot.elastic_goodput(rows, 1.0, 600.0, logs=True) == pytest.approx(
        (2400, 2400 - 2 * 5 - 2 * 0.1 * 2 - (4 + 1 + again))
    )


def test_the_goodput_of_restarts_with_a_log_is_what_a_hand_computes():
    """Each restart takes 10 s, and 30 s for the 150 s of steps since the newest checkpoint."""
    idle = 2 * 10 + (3 + 2 + 1) * (10 + 30)
    under_way = 0.1 * (2 + 3 + 2)
    assert spot.logged_restart_goodput(ROWS, 10.0, 600.0) == pytest.approx(
        (THERE, THERE - idle - under_way)
    )


def test_what_is_broken_does_not_count():
    rows = [ROWS[0], row("kill", 900, 2, 1, 1500, broken="a replica stands still")]
    assert spot.elastic_goodput(rows, 1.0, 600.0, logs=True) == pytest.approx(
        (2400, 2400 - 10 - 600)
    )


def test_a_second_call_goes_on_after_the_events_that_the_first_has_handled(
    tmp_path, monkeypatch, capsys
):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "# counts\nzone,seconds,available\na,0,0\na,300,4\na,600,12\na,900,5\na,1200,0\na,1500,16\n"
    )
    monkeypatch.setattr(spot, "import_seconds", lambda: 1.5)
    for count in (2, 4):
        words = f"--trace {trace} --machines 3 --events {count} --pace-s 0 --limit-s {LIMIT_S} --out {tmp_path / 'out'}"
        spot.run(spot.parsed(words.split()))
    found = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_text().splitlines()]
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    assert [each["after"] for each in found] == [1, 3, 1, 0]
    assert (
        "4 events, 3 machines" in (said := capsys.readouterr().out)
        and said.count("Violations: 0.") == 2
    )
