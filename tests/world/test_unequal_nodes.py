"""Replicas of different numbers of ranks: they train as replicas of equally many, bit for bit, and are equal."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import detonation as dt
import worlds
import zoo
from commands import free_port
from covering import covered, some
from detonation.checkpoint.newest import load_checkpoint
from detonation.core import runtime
from detonation.core.link.link import Mismatch
from limits import LIMIT_S

pytestmark = pytest.mark.usefixtures("lasting_worlds")

SCHEMES = [*zoo.TALKING]
FEW = [name for name in zoo.KINDS if name in SCHEMES]
BASES = {
    "adamw": partial(
        torch.optim.AdamW, lr=1e-2, betas=(0.0, 0.95)
    ),  # without the second momentum of a demo
    "signsgd": partial(dt.SignSGD, lr=1e-2),
    "muon": partial(dt.Muon, lr=1e-2, momentum=0.0),
    "normuon": partial(dt.Muon, lr=1e-2, momentum=0.0, muon_beta2=0.9),
}
Sizes = tuple[int, ...]


def run(function: Any, sizes: Sizes, *arguments: Any) -> list[Any]:
    """What `function(sizes, *arguments)` returns on each rank of nodes of these sizes."""
    return worlds.run(_called, sum(sizes), 1, function, sizes, *arguments)


def _called(_: Any, function: Any, sizes: Sizes, *arguments: Any) -> Any:
    return function(sizes, *arguments)


@lru_cache
def mesh_of(sizes: Sizes) -> Any:
    """One for all functions that a rank runs: groups of processes that nobody uses cost time as long as they are."""
    return dt.init_mesh(shards=sizes, device="cpu")


class Run:
    """A model and its optimizer on nodes of some sizes; the ranks of a node see the same batches."""

    def __init__(
        self, sizes: Sizes, scheme: Any, base: str = "adamw", model: str = "Plain", **options: Any
    ) -> None:
        self.mesh = mesh_of(sizes)
        self.model = dt.shard(zoo.built(getattr(zoo, model)), self.mesh)
        scheme = zoo.SCHEMES[scheme] if isinstance(scheme, str) else scheme
        made = BASES[base](self.model.parameters())
        self.optimizer = dt.replicate(made, self.model, self.mesh["replicate"], scheme, **options)
        self.node = next(
            node for node in range(len(sizes)) if dist.get_rank() < sum(sizes[: node + 1])
        )
        self.width, self.step = 257 if model == "Menagerie" else 32, 0

    def train(self, steps: int, overlap: bool = False) -> "Run":
        for _ in range(steps):
            loss = self.model(zoo.batch(self.node, self.step, self.width)).mean()
            if overlap:
                with self.optimizer.overlap():
                    loss.backward()
            else:
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: _full(p) for name, p in self.model.named_parameters()}


def _full(parameter: Any) -> Tensor:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def _trained(
    sizes: Sizes, scheme: str, base: str, model: str = "Plain", clip: float | None = None
) -> Any:
    run = Run(sizes, scheme, base, model, clip=clip, safety=dt.Safety(verify_every=1)).train(4)
    norm = run.optimizer.stats.grad_norm
    run.optimizer.synchronize()
    same = dt.fingerprint(run.model, run.mesh)
    return (
        run.weights(),
        run.optimizer.stats.bytes_sent,
        same,
        None if norm is None else float(norm),
    )


@lru_cache
def trained(sizes: Sizes, *arguments: Any) -> list[Any]:
    return run(_trained, sizes, *arguments)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long_cases(
    "demo-tiles-64-sign-signsgd", "streaming-adamw", "decoupled-adamw-adamw", "sparta-signsgd"
)
@some(
    "scheme, base",
    [(name, base) for name in SCHEMES for base in ("adamw", "signsgd")],
    keep=[(name, ("adamw", "signsgd")[at % 2]) for at, name in enumerate(FEW)],
)
def test_nodes_of_1_and_2_ranks_train_as_two_nodes_of_2(scheme: str, base: str) -> None:
    uneven, even = (trained(sizes, scheme, base) for sizes in ((1, 2), (2, 2)))
    assert all(equal(each[0], even[0][0]) for each in uneven)
    assert all(each[2] == even[0][2] and each[2][1] for each in uneven)  # the fingerprint, too
    per_node = [uneven[0][1], uneven[1][1] + uneven[2][1]]
    assert per_node == [even[0][1] + even[1][1], even[2][1] + even[3][1]]


@pytest.mark.long_cases(
    "full-adamw-sizes1",
    "demo-signsgd-sizes13",
    "demo-owner-adamw-sizes18",
    "demo-tiles-64-sign-signsgd-sizes30",
    "streaming-signsgd-sizes45",
    "sparseloco-adamw-sizes50",
    "muloco-2bit-signsgd-sizes62",
    "sparta-adamw-sizes65",
    "decoupled-adamw-signsgd-sizes77",
)
@some(
    "scheme, base, sizes",
    product(zoo.KINDS, ["adamw", "signsgd"], [(2, 4), (2, 3), (3, 1), (1, 2, 3)]),
    keep=[
        (name, ("adamw", "signsgd")[at % 2], ((2, 3), (3, 1))[at // 2 % 2])
        for at, name in enumerate(zoo.KINDS)
    ]
    + [("demo", "signsgd", (1, 2, 3))],
)
def test_replicas_of_any_sizes_agree_whatever_the_shapes(
    scheme: str, base: str, sizes: Sizes
) -> None:
    ranks = trained(sizes, scheme, base, "Menagerie")
    assert all(equal(each[0], ranks[0][0]) and each[2][1] for each in ranks)
    assert all(each[2] == ranks[0][2] for each in ranks)


@pytest.mark.long_cases("full-muon")
@pytest.mark.parametrize(
    "scheme, base", [("full", "muon"), ("muloco", "muon"), ("full", "normuon")]
)
def test_muon_takes_whole_matrices_on_any_node(scheme: str, base: str) -> None:
    uneven, even = (trained(sizes, scheme, base) for sizes in ((1, 2), (2, 2)))
    assert all(equal(each[0], even[0][0]) for each in uneven)


@pytest.mark.long  # 1 and 2 with more ranks
def test_nodes_of_2_and_4_ranks_train_as_two_nodes_of_4() -> None:
    uneven, even = (trained(sizes, "demo", "adamw") for sizes in ((2, 4), (4, 4)))
    assert all(equal(each[0], even[0][0]) for each in uneven)
    assert sum(each[1] for each in uneven[:2]) == sum(each[1] for each in even[:4])


@pytest.mark.parametrize("scheme", ["full", "diloco"])
def test_all_replicas_clip_by_the_same_bits(scheme: str) -> None:
    clipped, free = (trained((1, 2), scheme, "adamw", "Plain", clip) for clip in (0.02, None))
    assert all(equal(each[0], clipped[0][0]) for each in clipped)
    assert not equal(clipped[0][0], free[0][0])
    if scheme == "full":
        even = trained((2, 2), scheme, "adamw", "Plain", 0.02)
        assert {each[3] for each in clipped} == {clipped[0][3]}
        assert clipped[0][3] == pytest.approx(even[0][3], rel=1e-6)


def _padding(sizes: Sizes, scheme: str) -> Any:
    run = Run(sizes, scheme, "signsgd", model="Padded").train(4)
    run.optimizer.synchronize()
    return run.weights(), zoo.Padded().words.weight[zoo.Padded.padding].detach()


@pytest.mark.long_cases("diloco")
@pytest.mark.parametrize("scheme", ["demo", "diloco"])
def test_padding_rows_stay_in_pieces(scheme: str) -> None:
    uneven, even = (run(_padding, sizes, scheme) for sizes in ((1, 2), (2, 2)))
    assert all(equal(each[0], even[0][0]) for each in uneven)
    assert torch.equal(uneven[0][0]["words.weight"][zoo.Padded.padding], uneven[0][1])


def _overlapped(sizes: Sizes) -> Any:
    return Run(sizes, "demo").train(3, overlap=True).weights()


@pytest.mark.long  # no branch of its own
def test_overlap_changes_nothing() -> None:
    assert all(equal(each, trained_in(3)) for each in run(_overlapped, (1, 2)))


@lru_cache
def trained_in(steps: int) -> dict[str, Tensor]:
    return run(_plainly, (2, 2), steps)[0]


def _plainly(sizes: Sizes, steps: int) -> dict[str, Tensor]:
    return Run(sizes, "demo").train(steps).weights()


def _frozen(sizes: Sizes, scheme: str) -> Any:
    run = Run(sizes, scheme).train(3)
    weight = run.model.get_parameter("layers.1.weight")
    weight.requires_grad_(False)
    run.train(2)
    weight.requires_grad_(True)
    run.train(2).optimizer.reconfigure(zoo.SCHEMES[scheme])
    run.train(2).optimizer.synchronize()
    return run.weights()


@pytest.mark.long_cases("demo-owner")
@some("scheme", ["demo", "demo-owner", "diloco", "streaming"], keep=["demo-owner", "streaming"])
def test_parameters_freeze_and_schemes_change(scheme: str) -> None:
    uneven, even = (run(_frozen, sizes, scheme) for sizes in ((1, 2), (2, 2)))
    assert all(equal(each, even[0]) for each in uneven)


def _desync(sizes: Sizes, repairs: bool) -> Any:
    safety = dt.Safety(verify_every=1, on_desync="repair" if repairs else "stop")
    run = Run(sizes, "demo", safety=safety).train(2)
    if dist.get_rank() == 0:
        with torch.no_grad():
            run.model.get_parameter("layers.1.weight").to_local()[-1, 0] += (
                1  # in the second piece of this rank
            )
    return worlds.caught(run.train, 1), run.weights()


def test_a_difference_in_one_piece_stops_all_ranks_by_name() -> None:
    found = [error for error, _ in run(_desync, (1, 2), False)]
    assert {kind for kind, _ in found} == {"Desync"}
    assert all("layers.1.weight" in text for _, text in found)


@pytest.mark.long  # no branch of its own
def test_a_difference_in_one_piece_is_repaired() -> None:
    ranks = run(_desync, (1, 2, 1), True)
    assert {kind for (kind, _), _ in ranks} == {"nothing"}
    assert all(equal(weights, ranks[0][1]) for _, weights in ranks)


def _infinite(sizes: Sizes, rank: int, policy: str) -> Any:
    run = Run(sizes, "demo", safety=dt.Safety(non_finite=policy)).train(1)

    def step() -> None:
        run.model(zoo.batch(run.node, 1, 32)).mean().backward()
        if dist.get_rank() == rank:
            run.model.get_parameter("layers.1.weight").grad.to_local()[-1, 0] = float("inf")
        run.optimizer.step()
        run.optimizer.zero_grad()

    error = worlds.caught(step)
    return error, run.weights(), error[0] == "nothing" and run.train(1).weights()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_gradient_that_is_not_finite_stops_all_ranks(rank: int) -> None:
    found = [error for error, *_ in run(_infinite, (1, 2), rank, "stop")]
    assert {kind for kind, _ in found} == {"NonFiniteGradient"}
    assert all("layers.1.weight is not finite on replica" in text for _, text in found)


def test_a_gradient_that_is_not_finite_is_left_out_alike() -> None:
    ranks = run(_infinite, (1, 2), 2, "skip")
    assert all(error[0] == "nothing" and equal(after, ranks[0][2]) for error, _, after in ranks)


def _late(_: Any, sizes: Sizes, rank: int) -> Any:
    """The step at which this rank stops, where decisions are made on the device."""
    runtime.decides_on_device = lambda device: True
    run = Run(sizes, "demo", "signsgd").train(1)
    if dist.get_rank() == rank:
        weight = run.model.get_parameter("layers.1.weight")
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.to_local()[-1].fill_(torch.inf))
    return worlds.caught(run.train, 4)[0], run.step


@pytest.mark.long_cases("2")
@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_stop_at_one_step_where_the_device_decides(rank: int) -> None:
    """A rank that is a node of its own knows at once what others must first tell each other."""
    assert set(worlds.run_alone(_late, 3, 1, (1, 2), rank)) == {("NonFiniteGradient", 3)}


def _saved(sizes: Sizes, folder: str, scheme: str, base: str) -> Any:
    run = Run(sizes, scheme, base).train(3)
    dt.save_checkpoint(folder, run.model, run.optimizer, {"step": 3})
    return run.train(3).weights(), run.optimizer.local_state()


def _resumed(sizes: Sizes, folder: str, scheme: str, base: str) -> Any:
    run = Run(sizes, scheme, base)
    loaded = load_checkpoint(folder, run.model, run.optimizer)
    assert loaded is not None
    run.step = loaded.step
    start = run.weights()
    run.train(3)
    run.optimizer.synchronize()
    same = dt.fingerprint(run.model, run.mesh)[1]
    return start, run.weights(), loaded.merged, same


def _going_on(sizes: Sizes, folder: str, scheme: str, base: str) -> Any:
    """Saves, and resumes in the same world: both must end alike."""
    after, state = _saved(sizes, folder, scheme, base)
    run = Run(sizes, scheme, base)
    loaded = load_checkpoint(folder, run.model, run.optimizer)
    run.step = loaded.step
    weights = run.train(3).weights()
    resumed = run.optimizer.local_state()
    return equal(weights, after) and equal(resumed, state), loaded.merged


@pytest.mark.long_cases(
    "full-adamw",
    "demo-signsgd",
    "demo-tiles-64-sign-signsgd",
    "streaming-signsgd",
    "sparseloco-adamw",
    "muloco-2bit-signsgd",
    "sparta-adamw",
    "decoupled-adamw-signsgd",
)
@covered("scheme, base", zoo.KINDS, ["adamw", "signsgd"])
def test_resuming_goes_on_bit_for_bit(scheme: str, base: str, tmp_path: Path) -> None:
    assert set(run(_going_on, (1, 2), str(tmp_path), scheme, base)) == {(True, "exactly as saved")}


@pytest.mark.long_cases("demo-worlds_of0", "diloco-worlds_of8", "streaming-worlds_of9")
@covered(
    "scheme, worlds_of",
    ["demo", "demo-owner", "diloco", "streaming"],
    [((1, 2), (2, 2)), ((2, 2), (1, 2)), ((1, 2), (2, 1))],
)
def test_a_checkpoint_of_equally_cut_nodes_is_the_same_file(
    scheme: str, worlds_of: tuple[Sizes, Sizes], tmp_path: Path
) -> None:
    """The shards of 1 and 2 ranks are those of 2 and 2, so replicas go on with their own state in either world."""
    before, now = worlds_of
    after = [weights for weights, _ in run(_saved, before, str(tmp_path), scheme, "adamw")]
    resumed = run(_resumed, now, str(tmp_path), scheme, "adamw")
    assert {merged for _, _, merged, _ in resumed} == {"exactly as saved"}
    assert all(same for *_, same in resumed)
    if scheme == "demo":  # the others are in the middle of a round
        assert all(equal(weights, after[0]) for _, weights, _, _ in resumed)


@pytest.mark.long_cases("now0-demo", "now3-diloco", "now7-diloco")
@covered("now, scheme", [(1, 1), (2, 3), (3,), (1, 2, 1)], ["demo", "diloco"])
def test_a_checkpoint_loads_on_any_division(scheme: str, now: Sizes, tmp_path: Path) -> None:
    run(_saved, (1, 2), str(tmp_path), scheme, "adamw")
    resumed = run(_resumed, now, str(tmp_path), scheme, "adamw")
    assert all(f"to {len(now)} x" in merged and same for _, _, merged, same in resumed)
    if scheme == "demo":
        kept = run(_resumed, (1, 2), str(tmp_path), scheme, "adamw")
        assert all(equal(start, kept[0][0]) for start, *_ in resumed)


def _apart(sizes: Sizes, folder: str) -> Any:
    """Each node saves in a directory of its own, and resumes from it."""
    run = Run(sizes, "demo").train(2)
    own = f"{folder}/node{run.node}"
    dt.save_checkpoint(own, run.model, run.optimizer)
    after = run.train(2).weights()
    again = Run(sizes, "demo")
    loaded = load_checkpoint(own, again.model, again.optimizer)
    again.step = loaded.step
    return equal(again.train(2).weights(), after), sorted(
        path.name for path in loaded.path.iterdir()
    )


@pytest.mark.long  # no branch of its own
def test_nodes_without_a_shared_file_system_need_their_own_files_alone(tmp_path: Path) -> None:
    ranks = run(_apart, (1, 2), str(tmp_path))
    assert all(same for same, _ in ranks)
    assert ranks[0][1] == [
        "manifest.json",
        "replica0-shard0.safetensors",
        "replica0-shard1.safetensors",
    ]
    shutil.rmtree(tmp_path)


def _weights_of_the_first(sizes: Sizes) -> Any:
    mesh = dt.init_mesh(shards=sizes, device="cpu")
    torch.manual_seed(dist.get_rank())
    model = zoo.Plain()
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh["shard"])
    before = dt.fingerprint(model, mesh)[1]
    dt.same_weights(model, mesh["replicate"])
    return before, *dt.fingerprint(model, mesh)


def test_same_weights_makes_all_replicas_equal() -> None:
    ranks = run(_weights_of_the_first, (1, 2))
    assert {(before, after) for before, _, after in ranks} == {(False, True)}
    assert len({sha256 for _, sha256, _ in ranks}) == 1


def _mismatch(sizes: Sizes) -> Any:
    run = Run(sizes, "full")
    if run.node:
        with torch.no_grad():
            run.model.get_parameter("layers.0.bias").to_local().add_(
                dist.get_rank() == 2
            )  # in one piece of two
    return worlds.caught(run.train, 1)


def test_other_weights_are_named_on_all_ranks() -> None:
    found = run(_mismatch, (1, 2))
    assert {kind for kind, _ in found} == {Mismatch.__name__}
    assert all("layers.0.bias (weights)" in text for _, text in found)


def _never_trained(sizes: Sizes, differs: bool) -> Any:
    mesh = dt.init_mesh(shards=sizes, device="cpu")
    model = zoo.built(zoo.Plain)
    model.layers[1].weight.requires_grad_(False)
    dt.shard(model, mesh)
    weight = model.get_parameter("layers.1.weight")
    if differs and dist.get_rank() == 2:
        with torch.no_grad():
            weight.to_local().add_(1)
    some = [p for p in model.parameters() if p.requires_grad]
    optimizer = dt.replicate(dt.SignSGD(some), model, mesh["replicate"], dt.demo())
    return worlds.caught(optimizer.set_up)


def test_weights_that_nobody_trains_are_compared_in_pieces() -> None:
    assert run(_never_trained, (1, 2), False) == [("nothing", "")] * 3
    found = run(_never_trained, (1, 2), True)
    assert all(
        kind == "Mismatch" and "layers.1.weight (frozen weights)" in text for kind, text in found
    )


def _refused(sizes: Sizes, case: str) -> Any:
    mesh = dt.init_mesh(shards=sizes, device="cpu")
    if case in ("shapes", "few"):
        rows = 1 if case == "few" else 8 + mesh["replicate"].replica
        return worlds.caught(dt.shard, torch.nn.Linear(8, rows), mesh)
    model = zoo.Plain() if case == "whole" else dt.shard(zoo.Plain(), mesh)
    base, axis, scheme = torch.optim.SGD(model.parameters(), lr=0.1), mesh["replicate"], dt.diloco()
    options: dict[str, Any] = {}
    if case == "balance":
        options = {"balance": True}
    if case == "intra_node":
        options = {"intra_node": mesh["shard"]}
    if case == "axes":
        options, axis, scheme = {"levels": [(mesh["shard"], dt.demo()), (axis, scheme)]}, None, None
    if case == "auto":
        return worlds.caught(partial(dt.auto, base, model, axis, step_seconds=0.1))
    if case == "wire":
        return worlds.caught(partial(dt.shard, wire=dt.shard_wire(nodes=2)), zoo.Plain(), mesh)
    if case == "fused":
        base, scheme = torch.optim.AdamW(model.parameters(), fused=True), "full"
    if case == "bf16":
        base, scheme = (
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], lr=0.1),
            "full",
        )

    def step() -> None:
        optimizer = dt.replicate(base, model, axis, scheme, **options)
        if case == "record":
            optimizer.record(object())
        optimizer.step()

    return worlds.caught(step)


REFUSED = {
    "balance": "balance=True: give slow nodes fewer examples",
    "intra_node": "intra_node: shard the model inside each node",
    "axes": "levels on several axes: take one axis",
    "whole": "is not cut by its first dimension over the ranks [1, 2] of a node: call fully_shard",
    "shapes": "weight (shape)=",
    "few": "has no row of any trained parameter: start fewer ranks",
    "fused": "AdamW of torch.float32: its result depends on how",
    "bf16": "SGD of torch.bfloat16: its result depends on how",
    "auto": "joins nodes of [1, 2] ranks",
    "wire": "shard_wire needs replicas of equally many ranks",
    "record": "can neither record updates nor publish weights",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_on_all_ranks(case: str) -> None:
    found = run(_refused, (1, 2), case)
    assert all(REFUSED[case] in text for _, text in found), found


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2, 1), (0, 3), ()])
def test_sizes_that_are_not_those_of_the_world_are_refused(sizes: Sizes) -> None:
    found = worlds.run(_sizes, 3, 1, sizes)
    assert all(kind == "ValueError" and "the world has 3" in text for kind, text in found)


def _sizes(_: Any, sizes: Sizes) -> Any:
    return worlds.caught(partial(dt.init_mesh, shards=sizes, device="cpu"))


_LOOP = """
import os, torch, detonation as dt
mesh = dt.init_mesh(device="cpu")
model = dt.shard(torch.nn.Linear(32, 8), mesh)
optimizer = dt.replicate(dt.SignSGD(model.parameters()), model, mesh["replicate"], dt.demo())
torch.manual_seed(mesh.get_rank())
for _ in range(3):
    model(torch.randn(4, 32)).mean().backward()
    optimizer.step()
said = mesh["replicate"].size(), mesh["shard"].size(), *dt.fingerprint(model, mesh)
os.write(1, f"world {said[0]} {said[1]} {said[2:]}\\n".encode())  # whole: the other rank writes to the same pipe
dt.leave()
"""


@pytest.mark.long  # five interpreters; what a launcher says is the test below
def test_torchrun_starts_other_numbers_of_ranks_on_other_nodes(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(_LOOP)
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--master-addr=127.0.0.1"]
    start.append(f"--master-port={free_port()}")
    nodes = [
        subprocess.Popen(
            [
                *start,
                f"--node-rank={node}",
                f"--nproc-per-node={node + 1}",
                str(tmp_path / "loop.py"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    told = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
    lines = [[line for line in text.splitlines() if line.startswith("world")] for text in told]
    assert [len(each) for each in lines] == [1, 2], told
    assert {line.split()[1] for each in lines for line in each} == {"2"}
    assert (
        len({line.split("(")[1] for each in lines for line in each}) == 1 and "True" in lines[0][0]
    )


def _launched(_: Any, local: Sequence[int]) -> Any:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": rank,
            "WORLD_SIZE": len(local),
            "LOCAL_WORLD_SIZE": local[rank],
        }.items():
            patch.setenv(name, str(value))
        _, text = worlds.caught(partial(dt.init_mesh, device="cpu"))
        if text:
            return text
        mesh = dt.init_mesh(device="cpu")
        return mesh["replicate"].size(), mesh["shard"].size(), mesh.mesh_dim_names


def test_the_launcher_says_how_many_ranks_each_node_has() -> None:
    names = ("replicate", "shard")
    assert worlds.run(_launched, 3, 1, (1, 2, 2)) == [(2, 1, names), (2, 2, names), (2, 2, names)]
    assert worlds.run(_launched, 4, 1, (2, 2, 2, 2)) == [(2, 2, names)] * 4
    assert all(
        "ranks of a node must have consecutive numbers" in text
        for text in worlds.run(_launched, 3, 1, (2, 1, 2))
    )


def _overflowed(sizes: Sizes, scheme: str, base: str) -> Any:
    """Weights after five steps, of which the third overflows on all nodes, and how far it moved."""
    made = Run(sizes, scheme, base, safety=dt.Safety(non_finite="skip"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    moved = torch.zeros(())
    for step in range(5):
        before = made.weights()
        loss = made.model(zoo.batch(made.node, step, made.width)).mean()
        if step == 2:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(made.optimizer)
        scaler.update()
        made.optimizer.zero_grad()
        if step == 2:
            moved = sum(
                (weight - before[name]).abs().sum() for name, weight in made.weights().items()
            )
    return made.weights(), float(moved)


@pytest.mark.parametrize("base", ["adamw", "signsgd"])
@pytest.mark.parametrize("scheme", ["full", "loco", "demo-sign"])
def test_a_step_that_overflows_everywhere_moves_nothing(scheme: str, base: str) -> None:
    uneven, even = (run(_overflowed, sizes, scheme, base) for sizes in ((1, 2), (2, 2)))
    assert all(moved == 0 for _, moved in (*uneven, *even))
    assert all(equal(weights, even[0][0]) for weights, _ in uneven)
