"""How far a step travels through the code, and how much users meet, does not rise."""

import json
import subprocess
import sys

import pytest

import way


@pytest.fixture(scope="module")
def travelled():
    """Of each kind of step, in a process of its own: what other tests import may attach at a seam."""
    command = [sys.executable, way.__file__, "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


@pytest.mark.parametrize(("kind", "road"), way.CEILINGS)
def test_a_step_travels_no_further_than_before(kind, road, travelled):
    calls, moves, files = travelled[f"{kind}, {road}"]
    most_calls, most_moves, most_files = way.CEILINGS[kind, road]
    assert calls <= most_calls, f"{calls} calls, not {most_calls}: attach the new feature at a seam"
    assert moves <= most_moves
    assert files <= most_files


@pytest.mark.parametrize("measure", way.SIZES)
def test_users_meet_no_more_than_before(measure):
    assert way.sizes()[measure] <= way.SIZES[measure]
