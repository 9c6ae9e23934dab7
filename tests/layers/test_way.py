"""The ratchet: how far a step travels through the code, and how large the package is, never rises."""

import json
import subprocess
import sys

import pytest

import way


@pytest.fixture(scope="module")
def travelled():
    """Of each kind of step, in a process of its own: what other tests import may attach at a seam."""
    found = subprocess.run(
        [sys.executable, way.__file__, "--json"], capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout)


@pytest.mark.parametrize("kind", way.STEPS)
def test_a_step_travels_no_further_than_before(kind, travelled):
    calls, moves, files = travelled[kind]
    most_calls, most_moves, most_files = way.CEILINGS[kind]
    assert calls <= most_calls, f"{calls} calls, not {most_calls}: attach what came in at a seam"
    assert moves <= most_moves and files <= most_files


@pytest.mark.parametrize("measure", way.SIZES)
def test_the_house_is_no_larger_than_before(measure):
    assert way.sizes()[measure] <= way.SIZES[measure]
