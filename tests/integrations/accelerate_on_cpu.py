"""Lets Accelerate shard on CPUs, which it takes for too slow: its check of the device is replaced. For tests only.

As a program it runs another one so:

    torchrun --nproc-per-node 4 tests/integrations/accelerate_on_cpu.py examples/huggingface_trainer.py
"""

import runpy
import sys

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def pretend() -> None:
    """Makes Accelerate take ranks on CPUs with gloo for ranks with GPUs."""
    PartialState._prepare_backend = lambda self, *args, **kwargs: (
        "gloo",
        DistributedType.MULTI_GPU,
    )
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


if __name__ == "__main__":
    pretend()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
