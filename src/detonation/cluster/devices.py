"""Chooses the device of each rank: a GPU, or the CPU if the machine shows no GPU or the user asks
for the CPU.
"""

import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from detonation.cluster.position import LaunchPosition

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that limit which GPUs a process sees; each of them can hide all GPUs."""
_SLURM = (
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPUS_PER_NODE",
)
_CPU = (
    'To train on the CPU, set CUDA_VISIBLE_DEVICES to "" (in the library: init_mesh(device="cpu"))'
)


@dataclass(frozen=True)
class GPUs:
    """The GPUs of this machine that this process can see.

    usable: number of GPUs that torch can use. supported: True if torch is built for GPUs. driver:
    path of the device file of the GPU driver, or "" if there is none.
    """

    usable: int
    supported: bool
    driver: str = ""


def look_for_gpus() -> GPUs:
    """Finds the GPUs that torch and the GPU driver show, without initialising a GPU."""
    files = sorted(
        path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)
    )
    if torch.version.hip:
        files += Path("/dev").glob("kfd")
    usable = 0
    if torch.cuda.is_available():
        usable = torch.cuda.device_count()
    supported = bool(torch.version.cuda or torch.version.hip)
    return GPUs(usable, supported, next(map(str, files), ""))


def choose_device(
    env: Mapping[str, str],
    gpus: GPUs,
    position: LaunchPosition | None = None,
    asked: str | None = None,
) -> torch.device:
    """Chooses the device of a rank. The rank gets the CPU only if no GPU is visible or the user
    asks for the CPU.

    A process that sees a single GPU uses this GPU, whatever its local rank is, because launchers
    such as srun hide the GPUs of other ranks. `position` is None if there is no launcher. `asked`
    is the device type that the user asks for: "cpu", "cuda" or None.

    Raises `ValueError` if the machine shows a GPU that the rank cannot use. The message names the
    setting to change.

    >>> choose_device({}, GPUs(8, True), LaunchPosition(13, 64, 5, 8))
    device(type='cuda', index=5)
    >>> choose_device({}, GPUs(0, False))
    device(type='cpu')
    """
    if asked not in (None, "cpu", "cuda"):
        raise ValueError(f"device is {asked!r}, must be 'cuda', 'cpu' or None")
    if asked == "cpu":
        return torch.device("cpu")
    if gpus.usable:
        return torch.device("cuda", _index(gpus.usable, position))
    reason = _reason(env, gpus)
    if asked == "cuda":
        why = f"torch {torch.__version__} sees no GPU{reason and ': ' + reason}"
        raise ValueError(f"device is 'cuda', but {why}; pass device='cpu' to train without a GPU")
    if reason and not any(env.get(name) in ("", "-1") for name in VISIBLE):
        raise ValueError(
            f"this rank would train on the CPU although there is a GPU: {reason}. {_CPU}"
        )
    return torch.device("cpu")


def require_gpu_each(gpus: GPUs, ranks: int) -> None:
    """Raises `ValueError` if this machine has GPUs, but fewer than `ranks`, so that ranks would
    share a GPU.
    """
    if 0 < gpus.usable < ranks:
        raise ValueError(
            f"{gpus.usable} GPU(s) are visible for {ranks} ranks on this machine: start one rank"
            f" per GPU (fewer --replicas or --shards, or torchrun --nproc-per-node {gpus.usable})."
            f" {_CPU}"
        )


def device_name(device: torch.device, host: str) -> str:
    """Returns a name of `device` that is unique in the cluster."""
    if device.type == "cpu":
        return f"the CPU of {host}"
    return (
        f"GPU {getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)} of {host}"
    )


def require_own_devices(names: Sequence[str]) -> None:
    """Raises `ValueError` if some ranks are on GPUs and others on CPUs, or if two ranks share a
    GPU.

    `names` holds the `device_name` of each rank.
    """
    on_cpu = [rank for rank, name in enumerate(names) if name.startswith("the CPU")]
    on_gpu = [rank for rank in range(len(names)) if rank not in on_cpu]
    if on_cpu and on_gpu:
        rank = on_cpu[0]
        other = on_gpu[0]
        raise ValueError(
            f"rank {rank} is on {names[rank]}, rank {other} on {names[other]}: give all ranks a"
            " GPU, or hide all GPUs from all ranks"
        )
    for rank, name in enumerate(names):
        if not on_cpu and (first := names.index(name)) < rank:
            raise ValueError(
                f"ranks {first} and {rank} share {name}: give each rank its own GPU (srun"
                " --gpus-per-task=1), or make all GPUs visible to all ranks of the machine and"
                " set LOCAL_RANK"
            )


def _index(usable: int, position: LaunchPosition | None) -> int:
    """Returns the index of the GPU that a rank uses if it sees `usable` GPUs."""
    if usable == 1 or position is None or position.world_size == 1:
        return 0
    if position.local_world_size is not None:
        require_gpu_each(GPUs(usable, True), position.local_world_size)
    if position.local_rank is None:
        raise ValueError(
            f"{usable} GPUs are visible, and the launcher does not say which rank of its machine"
            f" rank {position.rank} is: set LOCAL_RANK and LOCAL_WORLD_SIZE (or call"
            " torch.cuda.set_device), or make one GPU visible to each rank"
        )
    if position.local_rank >= usable:
        raise ValueError(
            f"LOCAL_RANK is {position.local_rank}, but {usable} GPUs are visible: start one rank"
            " per GPU"
        )
    return position.local_rank


def _reason(env: Mapping[str, str], gpus: GPUs) -> str:
    """Returns the reason why torch sees no GPU although the machine shows one; "" if the machine
    shows no GPU.
    """
    given = [name for name in VISIBLE if env.get(name, "-1") not in ("", "-1")]
    slurm = [name for name in _SLURM if env.get(name, "0") not in ("", "0")]
    if "NoDevFiles" in (env.get(name) for name in given):
        return (
            "SLURM gave this task no GPU (CUDA_VISIBLE_DEVICES=NoDevFiles); ask SLURM for a"
            " GPU, such as with --gpus-per-task=1"
        )
    if gpus.driver:
        signs = [gpus.driver]
    else:
        signs = [f"{name}={env[name]}" for name in [*given, *slurm]]
    if not signs:
        return ""
    if not gpus.supported:
        return (
            f"{signs[0]} shows a GPU, but torch {torch.__version__} is built without CUDA;"
            " install a torch that is built with CUDA"
        )
    return (
        f"{signs[0]} shows a GPU, but torch cannot use it; check nvidia-smi, the driver and"
        f" {', '.join(VISIBLE[:1])}"
    )


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: of the tensors on `device` if `device` is an accelerator,
    else of this process.
    """
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return 1024 * peak  # `ru_maxrss` is in bytes on macOS, in KiB on other systems
