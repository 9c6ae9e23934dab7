"""What devices can compute at most, as their makers state it."""

import tomllib
from pathlib import Path

import torch


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations per second of a device in dense bf16; None where that is not known."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """`peak_flops` of the device called `name`.

    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA A10G"), peak_of("NVIDIA A100-SXM4-80GB"), peak_of("other")
    (989000000000000, 70000000000000, 312000000000000, None)
    """
    peaks = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))
    words = f" {name.replace('-', ' ')} "
    return next((10**12 * peak for part, peak in peaks.items() if f" {part} " in words), None)
