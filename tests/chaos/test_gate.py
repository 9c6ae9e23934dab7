"""Parts of the gate: the cheapest faults at each change, one of every kind at night; `make chaos` runs all of it."""

import pytest
from faults import killed_and_stopped, uninterrupted
from gate import SHORT, bad_messages, gate
from rows import Row, table
from storage import corruptions


@pytest.mark.long  # kills are in tests/cli, damage in tests/checkpoint, messages in tests/laws/test_guard.py
def test_nothing_is_lost_by_a_kill_by_damage_and_by_bad_messages(tmp_path):
    whole = uninterrupted(tmp_path / "whole", 8)
    rows = killed_and_stopped(tmp_path / "killed", whole, seed=0, kills=1, stops=0)[:1]
    rows.append(
        corruptions(max((whole.out / "checkpoints").iterdir()), tmp_path / "corrupted", 0, 25)
    )
    rows.append(bad_messages(0, 1))
    assert not any(row.lost for row in rows), "\n" + table(rows)
    assert all(row.tried for row in rows)


@pytest.mark.long
def test_nothing_is_lost(tmp_path):
    rows = gate(0, SHORT, tmp_path)
    assert not any(row.lost for row in rows), "\n" + table(rows)
    kinds = [row for row in rows if "survived in place" not in row.name]
    assert [row.tried > 0 or row.note != "" for row in kinds] == [True] * 8


def test_the_table_names_the_losses():
    row = Row("a fault")
    row.add()
    row.add("the run")
    assert table([row]).splitlines()[2:] == [
        f"{'a fault':42} {2:6} {1:9} {1:5} {'-':>11}",
        "LOST a fault: the run",
    ]
