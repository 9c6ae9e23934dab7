"""The bytes that each Triton kernel must move, from the arguments of its launch."""

from collections.abc import Mapping
from typing import Any


def bytes_of(name: str, given: Mapping[str, Any], programs: int, numel: int) -> float:
    """The bytes that a launch must move to and from memory, each once; tables and what stays in a cache left out.

    Args:
        given: Arguments and constants of the kernel called `name`, by their names.
        numel: The fp32 parameters of the step.
    """
    if name == "scan_kernel":
        return 4 * numel
    if name == "encode_kernel":
        rows = given["count"] * given["owned"]
        residual = 8 * rows * given["CHUNK"] * given["MEMORY"]
        signal = given["arrived"].numel() if given["AGGREGATION"] else 4 * numel
        return residual + signal + given["message"].numel()
    if name in ("seal_kernel", "inspect_kernel"):
        return given["message"].numel() * (2 if given.get("JOIN") else 1)
    if name == "decode_kernel":
        into = {"signs": 8, "tensors": 4, "flat": 4}[given["INTO"]] * numel
        return into + (
            4 * given["rows"] * given["K"]
            if given["AGGREGATION"] == "sum"
            else given["message"].numel()
        )
    if name == "weigh_kernel":
        return programs // given["programs"] * 4 * given["numbers"]
    if name == "inspect_sum_kernel":
        return 4 * sum(given[f"count{run}"] for run in range(given["RUNS"]))
    return 0


def label(name: str, given: Mapping[str, Any]) -> str:
    """A kernel in a table: its name and role."""
    role = given.get("INTO") or ("reply" if given.get("ARRIVED_K") and given["replicas"] else "")
    name = name.removesuffix("_kernel")
    return f"{name} ({role})" if role else name
