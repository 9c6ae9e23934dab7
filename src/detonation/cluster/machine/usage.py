"""The use that a process makes of its device: the peak of its memory, and the arithmetic of which it is capable."""

import sys

import torch

try:
    import resource
except ImportError:  # no POSIX
    resource = None  # type: ignore[assignment]

_TERA = 10**12
PEAKS: dict[str, float] = {
    "B300": 2250 * _TERA,
    "B200": 2250 * _TERA,
    "GB200": 2500 * _TERA,
    "H200": 989 * _TERA,
    "H100 PCIe": 756 * _TERA,
    "H100 NVL": 835 * _TERA,
    "GH200": 989 * _TERA,
    "H100": 989 * _TERA,
    "H800": 989 * _TERA,
    "A100": 312 * _TERA,
    "A800": 312 * _TERA,
    "L40S": 362 * _TERA,
    "A40": 150 * _TERA,
    "A30": 165 * _TERA,
    "L4": 121 * _TERA,
    "A10G": 70 * _TERA,
    "RTX A6000": 155 * _TERA,
    "RTX 5090": 209 * _TERA,
    "RTX 4090": 165 * _TERA,
    "RTX 3090": 71 * _TERA,
    "MI325X": 1307 * _TERA,
    "MI300X": 1307 * _TERA,
}
"""Multiplications and additions per second in dense bf16, as the makers state them, by a part of the device's name."""


def peak_memory(device: torch.device) -> int | None:
    """Bytes of memory that this process has held at most: of tensors on an accelerator, else of the whole process.

    None where the platform does not say.
    """
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    if resource is None:
        return None
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held  # in bytes there, in KiB elsewhere


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations per second of a device in dense bf16; None where that is not known."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """`peak_flops` of the device called `name`.

    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA A10G"), peak_of("NVIDIA A100-SXM4-80GB"), peak_of("other")
    (989000000000000, 70000000000000, 312000000000000, None)
    """
    words = f" {name.replace('-', ' ')} "
    return next((peak for part, peak in PEAKS.items() if f" {part} " in words), None)
