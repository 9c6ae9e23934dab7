"""A package from outside adds a transport, a scheme and an engine by entry points, and they keep the laws."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from detonation import plugins
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
from detonation.core.schemes.scheme import SCHEMES, known_schemes
from detonation.extend import Communicator, axis_named
from detonation.testing import LawBroken, check_axis, check_scheme

PACKAGE = Path(__file__).with_name("outside")


def forget():
    plugins.plugin_names.cache_clear()
    plugins.plugins.cache_clear()
    SCHEMES.pop("quartered", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The package as if it were installed: its folder and its metadata are in the path."""
    monkeypatch.syspath_prepend(PACKAGE)
    forget()
    yield
    forget()


def ends(folder, replicas):
    return [
        axis_named("files", {"folder": str(folder), "replica": r, "replicas": replicas})
        for r in range(replicas)
    ]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_transport_over_files_keeps_the_laws(tmp_path, replicas):
    check_axis(ends(tmp_path, replicas))


def test_it_is_a_file_of_sixty_lines():
    assert len((PACKAGE / "outside/files.py").read_text().splitlines()) <= 60


def trained(mesh, folder):
    """The weights after three steps of one rank of two: over files, and over the process group."""
    found = []
    over_files = None
    if folder:
        arguments = {"replica": mesh["replicate"].get_local_rank(), "replicas": 2}
        over_files = axis_named("files", {"folder": folder, **arguments})
    for axis in (over_files, mesh["replicate"]):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(base, model, axis, dt.demo())
        for step in range(3):
            torch.manual_seed(10 * step + mesh["replicate"].get_local_rank())
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(digest(model.parameters()))
    return found


def test_processes_train_over_files_as_over_a_process_group(tmp_path):
    assert (
        len({each for found in worlds.run_alone(trained, 2, 1, str(tmp_path)) for each in found})
        == 1
    )


class Deaf(LoopbackCommunicator):
    """Hears itself in the place of the others."""


def test_a_transport_that_breaks_its_contract_is_named():
    with pytest.raises(
        LawBroken, match=r"^the contract of all_to_all: replica 0 got \[\[0, 1, 2\]"
    ):
        check_axis([Deaf(2), Deaf(2)])


def test_a_scheme_with_a_selection_of_its_own_keeps_the_laws_on_an_engine_of_its_own():
    scheme = dt.scheme("quartered", {"topk": 8})
    check_scheme(scheme)
    assert "quartered" in known_schemes()
    model = nn.Linear(64, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(), scheme)
    assert {each.channel.engine.name for each in optimizer.set_up()} == {"quarters"}
    other = dt.replicate(base, model, LoopbackCommunicator(), dt.demo())
    assert {each.channel.engine.name for each in other.set_up()} != {"quarters"}


def test_an_unknown_name_lists_what_is_installed():
    with pytest.raises(
        ValueError, match=r"^unknown name in detonation.axes 'file', did you mean 'files'"
    ):
        axis_named("file")


def test_a_name_that_is_built_in_is_refused(tmp_path, monkeypatch):
    metadata = tmp_path / "twice-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[detonation.engines]\nnative = mine:engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    with pytest.raises(ValueError, match=r"same name as detonation\.engines\.native_engine"):
        plugins.plugin_names("engines")


def test_an_axis_is_a_mesh_axis_or_a_declared_communicator():
    class Alike:
        replica = 0
        size = all_reduce = all_gather = all_to_all = Communicator.size

    model = nn.Linear(2, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"or a subclass of detonation\.extend\.Communicator$"):
        dt.replicate(base, model, Alike(), dt.full())
