"""A part of the gate that is short enough for every change; `make chaos` runs all of it."""

from gate import SHORT, gate
from rows import Row, table


def test_nothing_is_lost(tmp_path):
    rows = gate(0, SHORT, tmp_path)
    assert not any(row.lost for row in rows), "\n" + table(rows)
    kinds = [row for row in rows if "survived in place" not in row.name]
    assert [row.tried > 0 or row.note != "" for row in kinds] == [True] * 8


def test_the_table_names_the_losses():
    row = Row("a fault")
    row.add()
    row.add("the run")
    assert table([row]).splitlines()[2:] == [f"{'a fault':42} {2:6} {1:9} {1:5} {'-':>11}", "LOST a fault: the run"]
