"""Replicas on processors of different kinds, with and without compiled kernels, train together to the last bit."""

import os
import subprocess
import sys

import pytest

from limits import LIMIT_S

KINDS = [
    {},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
]
"""What libraries are told before torch is imported, for each rank; all but the first run without compiled kernels."""

RANK = """
import sys, torch, torch.distributed as dist
import detonation as dt
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1 + rank % 2)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
mesh, ends = dt.init_mesh(replicas=3, shards=1, device="cpu"), []
schemes = [dt.demo(), dt.demo(topk=8, precision="sign", decay=0.95), dt.random_sign(), dt.schemes.random(rate=1 / 4)]
for number, scheme in enumerate([*schemes, dt.full()]):
    model = torch.nn.Sequential(torch.nn.Linear(200, 130), torch.nn.ReLU(), torch.nn.Linear(130, 64))
    with torch.no_grad():
        for parameter in model.parameters():  # no generator: its numbers are rounded by the processor
            parameter.copy_((torch.arange(parameter.numel()) * 7919 % 1009 - 504).view(parameter.shape) / 2**13)
    base = dt.SignSGD(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer = dt.replicate(base, model, mesh["replicate"], scheme, kernels=rank == 0)
    for step in range(6):
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.verify()
    ends.append(dt.fingerprint(model, mesh)[0])
    engine = optimizer.build()[0].channel.engine.name
    if number == 0:
        assert engine.startswith("native") == (rank == 0), engine
model = torch.nn.Linear(200, 130)
torch.nn.init.constant_(model.weight, 0.5), torch.nn.init.constant_(model.bias, 0.5)
base = torch.optim.AdamW(model.parameters(), lr=1e-3)
try:
    dt.replicate(base, model, mesh["replicate"], dt.demo()).step()
    refused = "nothing"
except ValueError as error:
    refused = str(error)
print(*ends, torch.backends.cpu.get_cpu_capability(), "decode of a test vector" in refused, "engine=" in refused)
dt.leave()
"""


@pytest.mark.long  # two kinds of processor are in test_flipped_bits.py
def test_signs_of_few_coefficients_train_to_the_last_bit_on_processors_of_three_kinds(tmp_path):
    """AdamW, whose step torch rounds by the kind of processor, is refused there."""
    ranks = []
    for rank, kind in enumerate(KINDS):
        command = [sys.executable, "-c", RANK, str(rank), str(tmp_path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=os.environ | kind, **pipes))
    said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], [text[-1500:] for _, text in said]
    words = [out.split() for out, _ in said]
    assert len(words[0]) == 8 and words[0][:5] == words[1][:5] == words[2][:5]
    assert words[1][5] == "DEFAULT" and words[2][5] in ("AVX2", "DEFAULT")  # where the processor has no more
    assert [each[6:] for each in words] == [["True", "True"]] * 3
