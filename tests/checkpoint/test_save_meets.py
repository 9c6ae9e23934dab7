"""A save of messages in flight first meets all ranks: a rank that takes a step instead takes no message for its own."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import detonation as dt
import worlds
from detonation.checkpoint.gather import Texts
from detonation.core.link.link import Link
from zoo import Heads, batch, built

SCHEMES = {
    "owners": dt.schemes.streaming_diloco(every=2, fragments=2, delay=1, link="owner"),
    "fragments": dt.schemes.streaming_diloco(every=2, fragments=2, delay=1),
}


def order_of_collectives(mesh, name, folder, asynchronous):
    """The collectives of a save, in their order."""
    model = built(Heads)
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = dt.replicate(base, model, mesh["replicate"], SCHEMES[name])
    for step in range(3):  # the heads "b" to "d" are unused
        model(batch(dist.get_rank(), step, 24), "a").backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    with ExitStack() as stack:
        for kind, method in ((Texts, "gather"), (Link, "all_gather"), (Link, "all_to_all")):
            real = getattr(kind, method)

            def noted(self, *arguments, real=real, kind=kind):
                found.append(kind.__name__)
                return real(self, *arguments)

            stack.enter_context(patch.object(kind, method, noted))
        if asynchronous:
            with dt.Checkpoints(folder, model, optimizer) as checkpoints:
                checkpoints.save()
        else:
            dt.save_checkpoint(folder, model, optimizer)
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_save_meets_before_it_uses_the_links(name, asynchronous, tmp_path):
    for found in worlds.run(order_of_collectives, 2, 1, name, tmp_path, asynchronous):
        assert found[0] == "Texts"
        assert name == "fragments" or "Link" in found


SENT_EARLY = {
    link: dt.schemes.random(rate=1 / 4, link=link) for link in ("all-reduce", "all-gather", "owner")
}


def within_an_overlap(mesh, name, folder):
    """The errors of saves between overlap() and step(), by step; then a save after the step."""
    model = built(Heads)
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = dt.replicate(base, model, mesh["replicate"], SENT_EARLY[name])
    found = []
    for step in range(4):
        with optimizer.overlap():
            model(batch(dist.get_rank(), step, 24), "a").backward()
        if step:  # the first step sends no gradients early
            with pytest.raises(dt.errors.OverlapError) as error:
                dt.save_checkpoint(folder, model, optimizer)
            found.append(str(error.value))
            saves = dt.Checkpoints(folder, model, optimizer)
            with saves, pytest.raises(dt.errors.OverlapError):
                saves.save()
            assert not [*folder.iterdir()]
        optimizer.step()
        optimizer.zero_grad()
    return found, dt.save_checkpoint(folder, model, optimizer).name


@pytest.mark.parametrize("name", SENT_EARLY)
def test_a_save_before_the_step_of_gradients_that_were_sent_is_refused(name, tmp_path):
    for found, name_of_saved in worlds.run(within_an_overlap, 2, 1, name, tmp_path):
        assert len(found) == 3 and name_of_saved == "step-000004"
        for step, text in enumerate(found, 1):
            assert f"overlap() began at step {step}, but no step() followed" in text
