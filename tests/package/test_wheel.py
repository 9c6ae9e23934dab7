"""The package as users get it: an sdist, the wheel that is built from it alone, and an environment that has this wheel.

The environment sees the libraries of this one by their directories, so that nothing is downloaded. A path in a `.pth`
file is only searched: the links of an editable installation are not followed there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import util
from pathlib import Path

import pytest

from commands import free_port

ROOT = Path(__file__).parents[2]
BUILD = "import sys, hatchling.build as backend; getattr(backend, sys.argv[1])(sys.argv[2])"
LOOP = """
import os, sys

import torch
import torch._dynamo, torch.distributed.fsdp  # once, for both ranks
from torch import nn

ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        break
else:
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))


class Model(nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()


torch.manual_seed(0)
model, loader = Model(64, 64), torch.randn(3, 8, 64)
{readme}
_, equal = dt.fingerprint(model, mesh)
if not rank:
    print("detonation of", dt.init_mesh.__code__.co_filename)
    print("equal:", equal, "steps:", optimizer.step_count, flush=True)
dt.leave()
os._exit(0)
"""
TYPED = """
import torch

import detonation as dt
from detonation.integrations.ddp import comm_hook

model = torch.nn.Linear(2, 2)
mesh = dt.init_mesh(replicas=1, shards=1)
dt.shard(model, mesh)
optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], dt.demo(topk=4))
sent: int = optimizer.stats.bytes_sent
dt.save_checkpoint("checkpoints", model, optimizer)
"""
WRONG = """
wrong: str = optimizer.stats.bytes_sent
dt.dmo()
dt.demo(topk="4")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist, and with the wheel that was built from the unpacked sdist."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-c", BUILD, "build_sdist", str(folder)], cwd=ROOT, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run(
        ["tar", "-xf", str(sdist), "-C", str(folder)], check=True
    )  # tarfile's filters came with 3.11.4
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    subprocess.run(
        [sys.executable, "-c", BUILD, "build_wheel", str(folder)], cwd=unpacked, check=True
    )
    return folder


@pytest.fixture(scope="module")
def clean(built):
    """Runs a program of the environment that has the wheel; returns what it prints."""
    folder = built / "environment"
    venv.create(folder, symlinks=True)
    (wheel,) = built.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run([*install, "--no-index", "--no-compile", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    found = {
        Path(util.find_spec(name).origin).parents[1] for name in ("torch", "tyro", "transformers")
    }
    packages.joinpath("libraries.pth").write_text("".join(f"{path}\n" for path in found))
    work = built / "work"
    work.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(program, *arguments, **more):
        command = [folder / "bin" / program, *arguments]
        done = subprocess.run(
            command, cwd=work, env={**env, **more}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_wheel_holds_what_is_used_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    if tracked:
        assert names == {name.removeprefix("src/") for name in tracked.split()}
    beside = {"py.typed", "__init__.pyi", "plan/losses.json", "data/sources.toml"}
    assert {f"detonation/{name}" for name in beside} < names
    recipes = {f"detonation/recipes/{path.name}" for path in ROOT.glob("recipes/*.toml")}
    assert recipes and recipes < names
    assert all(name.startswith("detonation/") for name in names)


@pytest.mark.long  # no branch of its own
def test_it_reports_its_versions_and_its_files_are_those_of_the_wheel(clean, built):
    found = json.loads(clean("detonation", "--version", "--json"))
    assert {"detonation-torch", "torch", "transformers"} <= found["packages"].keys()
    first, *_ = clean("detonation", "--version").splitlines()
    assert first == f"detonation {found['packages']['detonation-torch']}"


@pytest.mark.long
def test_it_trains_a_recipe_by_name(clean, built):
    short = ["train.steps=2", "train.validation_batches=1", "model.layers=1"]
    ranks = ["--replicas", "2", "--shards", "1"]
    said = clean(
        "detonation", "train", "quick-lm", *ranks, "--set", *short, "--out", "run", "--json"
    )
    assert json.loads(said.splitlines()[-1])["replicas_equal"]
    assert (built / "work/run/report.html").is_file()


@pytest.mark.long
def test_the_loop_of_the_readme_runs(clean, built):
    (readme,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "shards=4" in readme
    (built / "work/loop.py").write_text(LOOP.format(readme=readme.replace("shards=4", "shards=1")))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = clean("python", "loop.py", **meeting).splitlines()
    assert said[0].startswith(f"detonation of {built / 'environment'}")
    assert said[1] == "equal: True steps: 3"


@pytest.mark.long
def test_type_checkers_see_its_types(clean, built):
    """mypy, without the types of torch, which it would read for a quarter of a minute; pyright where it is there."""
    work = built / "work"
    (work / "right.py").write_text(TYPED)
    (work / "wrong.py").write_text(TYPED + WRONG)
    skip = "[mypy]\nstrict = true\nignore_missing_imports = true\n[mypy-torch.*]\nfollow_imports = skip\n"
    (work / "mypy.ini").write_text(skip)
    python = str(built / "environment/bin/python")
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--python-executable",
        python,
    ]
    pyright = [shutil.which("pyright") or "", "--pythonpath", python]
    for command in [mypy, pyright] if pyright[0] else [mypy]:
        done = subprocess.run(
            [*command, "right.py", "wrong.py"],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        errors = [
            line for line in done.stdout.splitlines() if re.search(r"\.py:\d+.* error: ", line)
        ]
        assert len(errors) == 3 and all("wrong.py" in line for line in errors), done.stdout
        assert all(word in done.stdout for word in ("dmo", "topk")), done.stdout
