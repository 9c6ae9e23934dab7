"""A GPU that is not there, for Triton: kernels go through the real JIT and are compiled, but nothing is launched."""

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class FakeGPU:
    """What Triton asks of a driver of NVIDIA GPUs. Each launch goes to `launched`.

    Args:
        target: The compute capability, times ten. Change it to compile for another one.
        launched: Gets the handle of the compiled kernel (`CompiledKernel.function`), the programs, and the arguments.
    """

    def __init__(self, target: int, launched: Callable[..., None] = lambda *_: None) -> None:
        self.target, self._launched, self.utils = target, launched, self

    def activate(self) -> "FakeGPU":
        """Makes it the driver of this process."""
        driver.set_active(self)
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target  # the JIT keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return divmod(self.target, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
        }

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[object, object, int, int, int]:
        return object(), object(), 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def start(x: int, y: int, z: int, stream: int, function: object, *others: Any) -> None:
            self._launched(
                function, (x, y, z), others[4:]
            )  # behind the kernel's metadata and three of hooks

        return start
