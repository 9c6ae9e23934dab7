"""Two nodes that share no file system: the same path leads each to a disk of its own."""

import ctypes
import os
import subprocess

import pytest

_NEW_MOUNTS = 0x00020000


def make(folder):
    """The directory that `mount` gives each node a disk for; the disks are `folder/disk0` and `folder/disk1`."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mount points need root")
    for name in ("disk0", "disk1", "scratch"):
        (folder / name).mkdir()
    return folder / "scratch"


def mount(scratch, rank):
    """Gives this rank its node's disk at `scratch`: `unshare --mount`, then `mount --bind`. Ranks 2, 3 are node 1."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", scratch.parent / f"disk{rank // 2}", scratch], check=True)
