"""Lets torchtitan train on CPUs, of which it knows nothing: a module of the device is made up. For tests only.

As a program it is torchtitan's own command, which finds functions for `--config` here, too:

    torchrun --nproc-per-node 4 tests/integrations/torchtitan_on_cpu.py --module detonation.integrations.torchtitan \
        --config torchtitan_on_cpu.llama3_debugmodel --hf_assets_path DIR --dataloader.dataset_path DIR ...
"""

import json
import random
import runpy
import sys
import types
import warnings
from unittest import mock

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


def pretend():
    """Makes torchtitan take ranks on CPUs with gloo for ranks with GPUs. Comes before it is imported."""
    device = types.SimpleNamespace(
        device_count=lambda: 1,
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=2**30),
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )
    found = {"_get_available_device_type": lambda: "cpu", "_get_device_module": lambda kind: device}
    with mock.patch.multiple(
        torch._utils, **found
    ):  # which torchtitan asks once, when it is imported
        import torchtitan.tools.utils  # noqa: F401
    if not hasattr(torch.distributed, "set_timeout"):  # before torch 2.14; torchtitan 0.3 calls it
        torch.distributed.set_timeout = lambda timeout, group=None: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what torchtitan imports
        from torchtitan import trainer
        from torchtitan.distributed import fsdp

    waits = trainer.time
    trainer.time = types.SimpleNamespace(
        perf_counter=waits.perf_counter, sleep=lambda seconds: None
    )
    divide = fsdp.disable_fsdp_gradient_division

    def sum_by_gloo(
        model,
    ):  # in torchtitan's own hybrid sharding: gloo cannot multiply while it sums
        divide(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = sum_by_gloo


def llama3_debugmodel():
    """torchtitan's own, with an attention that CPUs have; short and in fp32."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.optimizer.implementation = "foreach"
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.parallelism.spmd_backend = "partial_dtensor"  # the only one that works with torch 2.13
    config.parallelism.data_parallel_replicate_degree = 2
    config.activation_checkpoint = None
    return config


def write_assets(folder):
    """A tokenizer of 256 words in `folder`, and 200 texts of 100 words in `folder/data`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "data").mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "t1", "eos_token": "t2"}')
    choose = random.Random(0)
    walks = [(choose.randrange(250), choose.randrange(1, 4)) for _ in range(200)]
    texts = [
        " ".join(f"t{(start + step * i) % 250 + 3}" for i in range(100)) for start, step in walks
    ]
    (folder / "data" / "texts.json").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts)
    )
    return folder


if __name__ == "__main__":
    sys.modules["torchtitan_on_cpu"] = sys.modules["__main__"]
    pretend()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
