"""Blocks of code of the documentation: each runs as it stands, or is checked as far as it can be without running."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import tyro
from pages import PAGES, ROOT, all_blocks, blocks

import worlds
from detonation.cli.arguments import Common, Shortcuts, verbs
from detonation.cli.command import run_command
from detonation.cli.verbs import SHORTCUTS, assignments
from detonation.train.recipe.resolve import merge, read_layers, read_recipe, resolve

# -- the shell


def commands():
    """Each command line of detonation in a block for the shell, with the words after `detonation`."""
    for block in all_blocks("bash"):
        for words in block.commands:
            rest = words[words.index("detonation") + 1 :] if "detonation" in words else []
            if rest and rest[0] != ".":  # the folder of `docker build`
                yield (
                    block,
                    rest[
                        : next(
                            (i for i, word in enumerate(rest) if word in (">", "|", "&&")),
                            len(rest),
                        )
                    ],
                )


@pytest.mark.parametrize("block", all_blocks("bash"), ids=str)
def test_the_shell_reads_it(block):
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("block", "words"), [pytest.param(*c, id=f"{c[0]}:{c[1][0]}") for c in commands()]
)
def test_a_command_line_is_one_that_detonation_takes(block, words):
    if words[0] == "--version":
        return
    verb = tyro.cli(verbs(), args=words)
    recipe = getattr(verb, "recipe", None)
    if isinstance(verb, Common) and recipe is not None:
        own = str(recipe) in ("my.toml", "mine.toml", "RECIPE.toml")
        flags = vars(verb) if isinstance(verb, Shortcuts) else {}
        mesh = {key: getattr(verb, key, None) for key in ("replicas", "shards", "link")}
        sets = (*assignments(SHORTCUTS, flags), *chain(*verb.set))
        read_layers(Path("quick-lm") if own else recipe, sets, mesh=mesh).config()


def spans():
    """The command lines in running text that are whole: without dots and brackets, and with more than a verb."""
    for page in [*PAGES, "README.md"]:
        text = re.sub(
            r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE
        )
        for span in re.findall(r"`detonation ([a-z]+\s[^`]+)`", text):
            if not re.search(r"\.\.\.|\[|VERB", span):
                yield page, " ".join(span.partition(" > ")[0].split())


@pytest.mark.parametrize(("page", "span"), [*spans()])
def test_a_command_line_in_the_text_is_one_that_detonation_takes(page, span):
    tyro.cli(verbs(), args=shlex.split(span))


SMALL = {"--steps": "4", "--stop-after": "2", "--checkpoint-every": "2", "--replicas": "2"}
SETS = ["train.steps=4", "train.validation_batches=1", "model.layers=1", "model.hidden_size=32"]
RUN = sorted({block.page for block in all_blocks("bash") if not block.not_run})


def smaller(words):
    """The same command line over few steps of a tiny model, in two processes."""
    found = [SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    lists = words == ["train"] or "--print" in words
    shards = ["--shards", "1"] if words[0] in ("train", "compare") and not lists else []
    return [*found, *shards, "--set", *SETS] if shards or words[0] == "simulate" else found


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("my.txt").write_text("a text of the reader's\n" * 2000)
    for block in blocks(page, "bash"):
        for words in block.commands if not block.not_run else []:
            assert words[0] == "detonation", (
                f"{block}: a program that is not run here needs a reason"
            )
            line, _, target = " ".join(words[1:]).partition(" > ")
            with Path(target or "printed").open("w") as file, contextlib.redirect_stdout(file):
                assert run_command(smaller(line.split())) == 0, f"{block}: {' '.join(words)}"


# -- recipes


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_a_piece_of_a_recipe_has_keys_that_are_read(block):
    table = tomllib.loads(block.text)
    if "project" not in table:  # of an own package
        base = {
            key: value for key, value in read_recipe(Path("quick-lm")).items() if key != "tuned"
        }
        mesh = {key: value for key, value in base["mesh"].items() if key != "replicas"}
        levels = isinstance(table.get("scheme"), list)
        resolve({**base, "mesh": mesh, **table} if levels else merge(base, table), {})


# -- Python


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_python_reads_it(block):
    compile(block.text, str(block), "exec")


MODEL = """
import os, torch, detonation as dt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, batch):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

torch.manual_seed(0)
network = model = Model()
loader, rank = torch.randn(2, 4, 16), int(mesh.get_rank())
plain = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
REPLICATED = (
    MODEL
    + """
dt.shard(model, mesh)
plain = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = dt.replicate(optimizer, model, mesh["replicate"], dt.demo(topk=1, chunk=16))
scheduler, steps = torch.optim.lr_scheduler.ConstantLR(optimizer), 1
"""
)
WORLD = {'"cuda", (4, 8)': '"cpu", (2, 2)', "shards=4": "shards=2"}
"""The worlds of the pages, and those of this test."""
SETUPS = {
    "README.md": MODEL,
    "docs/checkpointing.md": REPLICATED,
    "docs/networks.md": MODEL
    + "dt.shard(model, mesh)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    "docs/tutorials/hsdp.md": MODEL,
    "docs/tutorials/from-detonation-0.5.md": MODEL,
    "docs/integrations/ddp.md": MODEL,
}
"""The names that a page has from its reader; the other pages begin without any."""
RUN_IN_A_WORLD = sorted(
    {block.page for block in all_blocks("python") if not block.not_run} | {"README.md"}
)


def run_page(mesh, page, folder):
    """Runs the blocks of a page in one namespace, in a directory that the ranks share; returns its names."""
    os.chdir(folder)
    names = {"mesh": mesh}
    exec(SETUPS.get(page, ""), names)
    for block in blocks(page, "python"):
        text = block.text
        for old, new in WORLD.items():
            text = text.replace(old, new)
        if not block.not_run:
            exec(compile("\n" * (block.line - 1) + text, page, "exec"), names)
    return sorted(names)


@pytest.mark.usefixtures("own_worlds")
@pytest.mark.parametrize("page", RUN_IN_A_WORLD)
def test_the_python_of_a_page_runs_from_its_first_block_to_its_last(page, tmp_path):
    worlds.run(run_page, 2, 2, page, str(tmp_path))
