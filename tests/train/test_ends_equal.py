"""A run whose replicas differ after their last step is a failure."""

import os

import pytest

from detonation.cluster.processes.failure import WorldError
from detonation.train.loop import fit

STEPS = 6


@pytest.mark.parametrize("scheme", ["demo", "diloco", "none"])
def test_replicas_that_differ_after_the_last_step_end_the_run(train, monkeypatch, scheme):
    """No comparison follows by itself: `verify_every` is longer than the run."""
    begin = fit._Meter.begin

    def begin_with_a_fault(meter):
        begin(meter)
        session = meter._session
        if os.environ["RANK"] == "1" and session.optimizer.step_count == STEPS - 2:
            next(session.model.parameters()).data.view(-1)[0] += 1

    monkeypatch.setattr(fit._Meter, "begin", begin_with_a_fault)
    sets = [f"train.steps={STEPS}", f"scheme.name={scheme}"]
    if scheme == "demo":
        with pytest.raises(WorldError, match="replica 1 differs from the other replicas"):
            train("run", *sets)
        return
    # the last round makes them equal; without an exchange they train apart
    assert train("run", *sets)[0]["replicas_equal"] == (scheme == "diloco")
