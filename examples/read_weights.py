"""Weights in training, read from the directory of `Feed.of_weights` with torch and Python alone: no detonation.

    python examples/read_weights.py runs/weights

Prints the step and the sha256 of the newest weights. `newest` is all that another program needs; it begins at the
newest base each time, where `detonation.follow` goes on from what it has.
"""

import hashlib
import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
TYPES |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
TYPES |= {"BOOL": torch.bool}


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytearray]:
    """What a file says of itself, its tensors by name, and their bytes. Raises `ValueError` where it is damaged."""
    content = bytearray(path.read_bytes())
    if hashlib.sha256(content).hexdigest()[:16] != path.name[20:36]:
        raise ValueError(f"{path} is damaged")
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return json.loads(header.pop("__metadata__")["json"]), header, content[8 + length :]


def numbers(header: dict[str, Any], data: bytearray, kind: str, count: int) -> torch.Tensor:
    """The gaps or deltas of a difference, whose bytes are in planes."""
    found = torch.zeros(count, dtype=torch.int64)
    for name in (each for each in header if each.startswith(kind)):
        plane = bytearray(zlib.decompress(data[slice(*header[name]["data_offsets"])]))
        found += torch.frombuffer(plane, dtype=torch.uint8).long() << 8 * int(
            name.rpartition(".")[2]
        )
    return found


def newest(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest step, and its weights by name."""
    base = sorted(folder.glob("*.base.safetensors"))[-1]
    about, header, data = opened(base)
    step, state = about["step"], about["state"]
    kinds = {name: (TYPES[each["dtype"]], each["shape"]) for name, each in header.items()}
    # Elements of one byte come last, and a difference counts each of them as 16 bits.
    wide = sum(
        kind.itemsize * math.prod(shape) for kind, shape in kinds.values() if kind.itemsize > 1
    )
    octets = torch.frombuffer(data + bytes(1), dtype=torch.uint8)[:-1]  # no buffer may be empty
    bits = torch.cat([octets[:wide].view(torch.int16), octets[wide:].short()])
    for path in sorted(folder.glob(f"{base.name[:6]}-*.difference.safetensors")):
        about, planes, coded = opened(path)
        if (about["after"], about["before"]) == (step, state):  # older ones are in the base
            positions = (numbers(planes, coded, "gaps", about["count"]) + 1).cumsum(0) - 1
            zigzag = numbers(planes, coded, "deltas", about["count"])
            bits[positions] += ((zigzag >> 1) ^ -(zigzag & 1)).short()
            step, state = about["step"], path.name[20:36]
    octets = torch.cat([bits[: wide // 2].view(torch.uint8), bits[wide // 2 :].to(torch.uint8)])
    parts = {name: octets[slice(*each["data_offsets"])] for name, each in header.items()}
    return step, {name: parts[name].view(kind).view(shape) for name, (kind, shape) in kinds.items()}


if __name__ == "__main__":
    at, weights = newest(Path(sys.argv[1]))
    digest = hashlib.sha256(
        b"".join(bytes(each.flatten().view(torch.uint8).tolist()) for each in weights.values())
    )
    print(
        f"step {at}, {sum(map(torch.numel, weights.values())):,} values, sha256 {digest.hexdigest()}"
    )
