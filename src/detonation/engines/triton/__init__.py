"""The engine for accelerators: Triton kernels encode, decode, seal and inspect whole messages, with
one launch each.
"""

import logging
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from detonation.core.runtime import Runtime, accelerator_is_played

if TYPE_CHECKING:
    from detonation.core.codec import Codec
    from detonation.core.engine import Room
    from detonation.core.flat.layout import Layout
    from detonation.core.memory import Memory
    from detonation.engines.triton.engine import TritonEngine

_log = logging.getLogger("detonation")


def triton_engine(
    codec: "Codec", layout: "Layout", memory: "Memory | None", runtime: Runtime, room: "Room | None"
) -> "TritonEngine | None":
    """Returns the engine for an accelerator if kernels support `codec`, otherwise None. On an
    accelerator, logs once which engine runs, and why it is not this engine.
    """
    if not runtime.decides_on_device:
        return None
    reason = why_not(runtime)
    if not reason:
        from detonation.engines.triton.coding import why_not_triton
        from detonation.engines.triton.engine import TritonEngine

        reason = why_not_triton(codec)
    if reason:
        note_engine(f"is torch, because {reason}")
        return None
    note_engine("is triton")
    return TritonEngine(codec, layout, memory, runtime, room)


def why_not(runtime: Runtime) -> str:
    """Returns the reason why a step cannot use Triton kernels; "" if it can."""
    if not runtime.kernels:
        return "kernels are turned off"
    if runtime.device.type != "cuda" and not accelerator_is_played():
        return f"the device is {runtime.device.type}"
    launches, reason = _launches()
    if runtime.device.type == "cuda" and launches is not None and launches.INTERPRETED:
        raise RuntimeError(
            "TRITON_INTERPRET=1 would run the kernels on the CPU, with addresses of the GPU:"
            " unset it"
        )
    return reason


@cache
def _launches() -> tuple[ModuleType | None, str]:
    try:
        from detonation.kernels.gpu import launches
    except ImportError as error:
        return None, f"triton cannot be imported: {error}"
    return launches, ""


@cache
def note_engine(what: str) -> None:
    """Logs, once for each reason, which engine runs on the accelerator, or which operations this
    engine leaves to plain torch.
    """
    _log.info("the engine on the accelerator %s", what)
