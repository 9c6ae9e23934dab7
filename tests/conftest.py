"""Settings that every test needs before torch starts threads."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

torch.set_num_threads(1)
