"""A follower over a slow link: the time to join, bytes by the kernel, and equal weights after each step.

    sudo python -m benchmarks.follow.link [--steps 2000] [--link 100mbit]
    sudo python -m benchmarks.follow.link --replica [--link 100mbit]

Two nodes, each a network namespace whose link the kernel slows down. In one, two replicas (threads of one process)
train the model of quick-lm on random tokens, with a feed; in the other a process follows. First it joins alone: the
seconds from the call of `follow` to the weights, beside those that the state needs at the rate of the link. Then it
follows, and hashes its weights after each step, as the training does. Bytes are the kernel's, at the follower's
interface, without headers of frames.

With `--replica` the process in the other node comes in as a third replica, with AdamW: printed are the seconds from the
call of `admitted` to its return, beside those that its bytes need, and whether all replicas are equal in the end.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.lab import FRAME_BYTES, NamespaceCluster, namespace_cluster

import detonation as dt
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.link_speed import LinkSpeed
from detonation.models import build_model

TOKEN = b"a token for a benchmark"
PORT = 7000
SCHEMES = {
    "random_sign 1/16": dt.random_sign(rate=1 / 16),
    "random_sign 1/64": dt.random_sign(rate=1 / 64),
    "demo 1/64 sign": dt.demo(topk=1, chunk=64, precision="sign", error_feedback=False),
    "demo 4/64": dt.demo(),
}


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model("olmo2", {"hidden_size": 128, "layers": 2, "heads": 4, "feed_forward": 512})


def train(
    communicator: SimulatedCommunicator,
    scheme: dt.schemes.Scheme,
    address: str,
    steps: int,
    out: Path,
) -> None:
    """Trains `steps` steps after a follower has come, and writes the hash of the weights after each."""
    model = made()
    optimizer = dt.replicate(dt.SignSGD(model.parameters(), lr=1e-3), model, communicator, scheme)
    feed = dt.Feed(model, optimizer, address, token=TOKEN) if communicator.replica == 0 else None
    optimizer.record(feed)
    generator, hashes = torch.Generator().manual_seed(communicator.replica), list[str]()
    for step in range(steps):
        if feed and step == 1:  # the first step sets up
            out.with_suffix(".ready").touch()
            while not feed.followers:
                time.sleep(0.01)
        ids = torch.randint(0, 256, (1, 32), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(digest(model.parameters()))
    if feed:
        feed.close(wait_s=600)
        out.write_text(json.dumps(hashes))


def follow(address: str, alone: bool, out: Path) -> None:
    """Follows to the end, or joins `alone`; writes seconds, bytes, and the hash of the weights after each step."""
    model = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    while not out.with_name("training.ready").exists():
        time.sleep(0.01)
    began = time.perf_counter()
    with dt.follow(model, address, token=TOKEN, timeout_s=600) as follower:
        joined = time.perf_counter() - began
        found: dict[str, Any] = {
            "seconds": joined,
            "bytes": follower.bytes_received,
            "first": follower.step,
        }
        hashes = [digest(model.parameters())]
        while not alone and not follower.ended:
            before = follower.step
            try:
                if follower.update(to=before + 1) == before + 1:
                    hashes.append(digest(model.parameters()))
            except dt.errors.LostFeed:
                break
        found |= {"hashes": hashes, "joins": follower.joins, "all_bytes": follower.bytes_received}
    out.write_text(json.dumps(found))


def train_elastic(replica: int, host: str, out: Path) -> None:
    """One of two replicas that train until the newcomer is in, and 20 steps more."""
    torch.set_num_threads(1)
    store = dist.TCPStore(host, PORT, is_master=replica == 0, wait_for_workers=False)
    axis, model = dt.elastic(replica=replica, replicas=2, store=store), made()
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-3), model, axis, dt.demo())
    door, last = dt.Admission(model, optimizer, host, token=TOKEN), math.inf
    while optimizer.step_count < last:
        step_elastic(model, optimizer, axis.replica)
        door.after_step()
        if optimizer.step_count == 5:
            out.with_name("training.ready").touch()
        if math.isinf(last) and axis.size() == 3:
            last = optimizer.step_count - 1 + 20
    end_elastic(model, axis, out.with_name(f"replica{replica}"))
    time.sleep(1.0)  # the store is here


def step_elastic(model: torch.nn.Module, optimizer: dt.Replicated, replica: int) -> None:
    ids = torch.randint(
        0,
        256,
        (1, 32),
        generator=torch.Generator().manual_seed(97 * optimizer.step_count + replica),
    )
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def end_elastic(model: torch.nn.Module, axis: Any, out: Path, **more: Any) -> None:
    axis.close()
    out.write_text(
        json.dumps({"hash": digest(model.parameters()), "replicas": axis.size(), **more})
    )


def come_in(host: str, cluster: NamespaceCluster, out: Path) -> None:
    """Comes in as a third replica, and takes 20 steps."""
    model = made()
    while not out.with_name("training.ready").exists():
        time.sleep(0.01)
    store = dist.TCPStore(host, PORT)
    before, began = cluster.counters(1), time.perf_counter()
    optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN)
    seconds, counted = time.perf_counter() - began, cluster.counters(1).since(before)
    first = optimizer.step_count
    while optimizer.step_count < first + 20:
        step_elastic(model, optimizer, axis.replica)
    received = counted.received_bytes - FRAME_BYTES * counted.received_frames
    end_elastic(
        model, axis, out.with_name("replica2"), seconds=seconds, received=received, step=first
    )


def join_as_replica(speed: LinkSpeed) -> None:
    """Prints the row of a third replica that comes in over the link."""
    with namespace_cluster(2, speed) as cluster, tempfile.TemporaryDirectory() as folder:
        host, out = cluster.address(0), Path(folder, "out")
        acts = [(0, lambda r=r: train_elastic(r, host, out)) for r in (0, 1)] + [
            (1, lambda: come_in(host, cluster, out))
        ]
        codes = [
            os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            for pid in [in_node(cluster, *act) for act in acts]
        ]
        if any(codes):
            raise SystemExit(f"processes ended with {codes}")
        found = [json.loads(out.with_name(f"replica{replica}").read_text()) for replica in range(3)]
    newcomer, equal = found[2], len({each["hash"] for each in found}) == 1
    needs = speed.seconds(newcomer["received"], 0)
    print(
        "| join, s | of which its bytes need | bytes by the kernel | came in after step | equal after 20 more |"
    )
    print("|---|---|---|---|---|")
    print(
        f"| {newcomer['seconds']:.2f} | {needs:.2f} | {newcomer['received']:,} | {newcomer['step']} | {equal} |"
    )


def in_node(cluster: NamespaceCluster, node: int, act: Callable[[], object]) -> int:
    """Starts `act` in a process in a node."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            cluster.enter(node)
            torch.set_num_threads(1)
            act()
            code = 0
        finally:
            os._exit(code)
    return pid


def run(
    name: str, scheme: dt.schemes.Scheme, speed: LinkSpeed, steps: int, alone: bool
) -> tuple[dict[str, Any], list[str], int]:
    """What the follower found, the hashes of training, and the bytes that the kernel counted, without headers."""
    with namespace_cluster(2, speed) as cluster, tempfile.TemporaryDirectory() as folder:
        address, path = f"{cluster.address(0)}:{PORT}", Path(folder)
        trainer = in_node(
            cluster,
            0,
            lambda: simulate_replicas(
                lambda c: train(c, scheme, address, steps, path / "training"), 2
            ),
        )
        before = cluster.counters(1)
        follower = in_node(cluster, 1, lambda: follow(address, alone, path / "followed"))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (follower, trainer)]
        if any(codes):
            raise SystemExit(f"{name}: processes ended with {codes}")
        counted = cluster.counters(1).since(before)
        found = json.loads((path / "followed").read_text())
        received = counted.received_bytes - FRAME_BYTES * counted.received_frames
        return found, json.loads((path / "training").read_text()), received


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--replica", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    speed, numel = LinkSpeed.parse(args.link), sum(p.numel() for p in made().parameters())
    if args.replica:
        print(f"{numel:,} parameters, {args.link}")
        join_as_replica(speed)
        return
    print(f"{numel:,} parameters, {args.link}, {args.steps} steps")
    print(
        "| scheme | join, s | of which the link needs | bytes of the state | steps compared | equal | joins | "
        "bytes per parameter and step | bytes in all | by the kernel |\n" + "|---" * 10 + "|"
    )
    for name in args.schemes:
        alone, *_ = run(name, SCHEMES[name], speed, 3, alone=True)
        found, hashes, counted = run(name, SCHEMES[name], speed, args.steps, alone=False)
        first, seen = found["first"], found["hashes"]
        equal = sum(mine == hashes[first - 1 + number] for number, mine in enumerate(seen))
        steps = max(1, len(seen) - 1)
        end = (found["all_bytes"] - found["bytes"]) / steps / numel
        cells = [
            name,
            f"{alone['seconds']:.2f}",
            f"{speed.seconds(alone['bytes'], 0):.2f}",
            f"{alone['bytes']:,}",
        ]
        cells += [str(len(seen)), str(equal), str(found["joins"]), f"{end:.4f}"]
        print(f"| {' | '.join(cells)} | {found['all_bytes']:,} | {counted:,} |", flush=True)


if __name__ == "__main__":
    main()
