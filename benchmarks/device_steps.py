"""Operations and bytes of an optimizer's step on an accelerator, by scheme: `detonation plan --device` reads them.

    python benchmarks/device_steps.py > src/detonation/plan/device_steps.json
    python benchmarks/device_steps.py --table          OLMo2-1B and 7B on 8 x 8 H100, from that file, as Markdown

The parameters are on the device `meta`: nothing is computed. Every operation but views counts as a launch, and the
bytes of its inputs and outputs as moved. An operation on a list of tensors launches once for each 320 blocks of 65,536
numbers of its lists, as torch's multi-tensor kernels do. The step of the base optimizer, which is the one that the
scheme's paper has, counts too.
"""

import argparse
import contextlib
import json
import math
from functools import partial
from typing import Any

import torch
from launches import olmo2_1b
from memory import Mirror, accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import detonation as dt
from detonation.core.schemes.registry import scheme as scheme_named
from detonation.core.schemes.traffic import LargerThanDense
from detonation.plan.data_sheets import DEVICES, LAUNCH_S, predicted_steps, step_counts
from detonation.plan.search import candidate_settings
from detonation.plan.spelling import changed, spelled

REPLICAS = (2, 8)
SIGNS = {"demo", "random", "random_sign", "striding", "slicing", "distro", "demo_published"}
"""Schemes of which the recipes step by signs."""
BLOCKS = 320 * 65536
SHOWN = ("none", "full", "demo", "demo(topk=1, precision=sign, error_feedback=False)", "random_sign", "diloco")
ADAMW = {"none", "full", "diloco"}
MODELS = {"OLMo2-1B": 1_484_916_736, "OLMo2-7B": 7_298_617_344}
"""Parameters of the published models."""


class Counts(TorchDispatchMode):
    """Counts launches, and the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket.__name__ not in ("empty", "empty_like", "detach"):
            lists = [arg for arg in args if isinstance(arg, list)]
            longest = max((sum(t.numel() for t in some if isinstance(t, Tensor)) for some in lists), default=0)
            self.launches += max(1, math.ceil(longest / BLOCKS))
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            read = {id(tensor): tensor.nbytes for tensor in tensors}
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.nbytes += sum(read.values()) + sum(tensor.nbytes for tensor in made)
        return out


def counted(scheme: dt.Scheme, replicas: int) -> tuple[int, float, int, float]:
    """Launches and bytes per parameter of a step that exchanges, and of one that does not."""
    shapes = olmo2_1b()
    model = nn.ParameterList([torch.zeros(shape, device="meta") for shape in shapes])
    base: Any = partial(torch.optim.AdamW, foreach=True)
    if scheme.name in SIGNS:
        base = dt.SignSGD
    elif scheme.name == "muloco":
        base = dt.Muon
    optimizer = dt.replicate(base(model.parameters(), lr=1e-3), model, Mirror(replicas), scheme, kernels=False)
    numel, every = sum(parameter.numel() for parameter in model), scheme.round.every
    found = []
    with accelerator():
        optimizer.build()
        for step in range(2 * every + scheme.round.delay + 1):
            for parameter in model:
                parameter.grad = torch.zeros_like(parameter)
            sent = optimizer.stats.bytes_sent
            with Counts() as counts, torch.no_grad():
                optimizer.step()
            if step >= every + scheme.round.delay:
                found.append((optimizer.stats.bytes_sent > sent, counts.launches, counts.nbytes / numel))
    exchanging = max((row[1:] for row in found if row[0]), default=max(row[1:] for row in found))
    local = min((row[1:] for row in found if not row[0]), default=exchanging)
    return exchanging[0], round(exchanging[1], 1), local[0], round(local[1], 1)


def short(scheme: dt.Scheme) -> dt.Scheme:
    """`scheme` with short rounds: their length changes no step."""
    every = scheme.arguments.get("every", 0)
    delay = (
        0 if scheme.round.delay == scheme.round.every else scheme.round.delay + 1
    )  # `eager_diloco` has no delay of its own
    fewest = max(4, scheme.arguments.get("fragments", 0), delay)
    return scheme_named(scheme.name, {**scheme.arguments, "every": fewest}) if every > fewest else scheme


def table(replicas: int) -> dict[str, tuple[int, float, int, float]]:
    rows = {}
    for scheme in candidate_settings():
        if changed(scheme).keys() - {"every"} or not changed(scheme):
            with contextlib.suppress(LargerThanDense):
                rows[spelled(scheme) if changed(scheme) else scheme.name] = counted(short(scheme), replicas)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the predictions for OLMo2 instead")
    parser.add_argument("--device", default="h100", choices=DEVICES)
    args = parser.parse_args()
    if not args.table:
        lines = [
            f'"{replicas}": {{\n' + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}"
            for replicas, rows in ((replicas, table(replicas)) for replicas in REPLICAS)
        ]
        print("{\n" + ",\n".join(lines) + "\n}")
        return
    print(
        "| model | scheme | launches | bytes per parameter | the host, ms | the memory, ms | a step, ms | floor, ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    device, counts = DEVICES[args.device], step_counts(8)
    for model, numel in MODELS.items():
        local = -(-numel // 8)
        steps = predicted_steps(device, [{"all": (local,)}], 8)
        for name in SHOWN:
            each = counts[name]
            host_s, memory_s = each.launches * LAUNCH_S, device.seconds(0, each.bytes_per_parameter * local)
            floor_s = device.seconds(0, (28 if name in ADAMW else 20) * local)
            numbers = [f"{1e3 * seconds:.2f}" for seconds in (host_s, memory_s, steps[name].exchange_s, floor_s)]
            print(
                "| "
                + " | ".join([model, f"`{name}`", str(each.launches), f"{each.bytes_per_parameter:g}", *numbers])
                + " |"
            )


if __name__ == "__main__":
    main()
