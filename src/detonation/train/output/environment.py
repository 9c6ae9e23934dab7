"""The environment of a run: versions, platform and threads. No host or user names."""

import os
import platform
from importlib import metadata
from typing import Any

_PACKAGES = (
    "detonation-torch", "torch", "transformers", "safetensors", "numpy", "tyro", "rich", "tomli-w", "matplotlib",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions of Python and the packages that matter, platform, processors, threads and GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "cuda": torch.version.cuda,
        "gpus": gpus,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The environment as lines to paste into a bug report."""
    flat = {**found, **found["packages"]}
    del flat["packages"]
    flat["gpus"] = ", ".join(found["gpus"]) or "none"
    return [f"- {key}: {'none' if value is None else value}" for key, value in flat.items()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
