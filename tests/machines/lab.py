"""The lab: pages whose blocks name several machines, the machines that they name, and what is made smaller.

A page runs from its first block of the lab to its last, as printed, on machines with the addresses
that it prints. Above such a block is a comment:

    <!-- lab: a; b --node-rank 1 -->      runs on a and, with that option, on b; waits for both
    <!-- lab meanwhile: a -->             runs while the next blocks run; ends with 0 by itself
    <!-- lab stays: a -->                 runs until the lab ends it, after the last block
    <!-- lab until "step": b -->          the same; the next block waits for these words of any command
    <!-- lab file: loop.py -->            is a file on each machine

Options in the comment replace those of the block: "--node-rank 1", or a variable "NODE=1".
"""

import os
import re
import signal
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import shell
import tomli_w
from nodes import Machines, Network

from commands import Command
from detonation.train.recipe.resolve import read_recipe
from docs.pages import Block, blocks
from limits import LIMIT_S

SMALLER = {
    r"--nproc-per-node [48]\b": "--nproc-per-node 2",
    r"\bGPUS=8\b": "GPUS=1",
    r"--steps \d{3,}": "--steps 6",
    r"--checkpoint-every \d{3,}": "--checkpoint-every 3",
    r"\b(train|probe|plan) (quick-lm|my\.toml)": r"\1 \2 --set model.layers=1 model.hidden_size=32 "
    r"model.feed_forward=64 model.heads=2 data.context=32 train.batch_size=2 "
    r"train.validation_batches=1 train.log_every=1 train.steps=6 --set schedule.warmup=1",
    r"\$\(openssl rand -hex 16\)": "0123456789abcdef0123456789abcdef",
}
"""What the lab replaces on every page: as many ranks, steps and weights as a test can wait for."""


@dataclass(frozen=True)
class Page:
    """A page in the lab. network: its machines. smaller: what it replaces besides `SMALLER`.

    env: What a launcher or a user sets on a machine.
    """

    network: Network
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    smaller: Mapping[str, str] = field(default_factory=dict)


def made_smaller(text: str, page: Page) -> str:
    """The text of a block, as the lab runs it."""
    for pattern, replacement in {**SMALLER, **page.smaller}.items():
        text = re.sub(pattern, replacement, text)
    return text


class Run:
    """A page that runs on machines which are up."""

    def __init__(self, name: str, page: Page, up: Machines) -> None:
        self.name, self._page, self._up = name, page, up
        self._exports = {name: dict(page.env.get(name, {})) for name in page.network.machines}
        self._later: list[tuple[Command, str]] = []
        self._titles: dict[Command, str] = {}

    def blocks(self) -> None:
        """Runs all blocks of the lab; raises `AssertionError` with what a command printed."""
        for block in blocks(self.name):
            if block.how:
                self._block(block)
        for command, how in self._later:
            if how != "lab meanwhile":
                os.kill(command.pid, signal.SIGTERM)
        for command, how in self._later:
            if how == "lab meanwhile":
                self.ended(command)

    def close(self) -> None:
        """Ends what still runs."""
        for command in self._titles:
            command.kill()

    def disk(self, machine: str) -> Path:
        """The directory in which commands on a machine start."""
        return self._up.disk(machine)

    def _block(self, block: Block) -> None:
        if block.how == "lab file":
            text = made_smaller(block.text, self._page)
            if block.language == "toml":  # the page shows the tables that differ from quick-lm's
                recipe = {**read_recipe(Path("quick-lm")), **tomllib.loads(text)}
                text = tomli_w.dumps({key: recipe[key] for key in recipe if key != "tuned"})
            for machine in self._page.network.machines:
                (self._up.disk(machine) / block.lab).write_text(text)
            return
        started = []
        for clause in block.lab.split(";"):
            machine, *options = clause.split()
            text = with_options(block.text, options)
            started.append(self.start(machine, text, f"{block} on {machine}"))
            self._exports[machine] |= shell.exports(made_smaller(text, self._page))
        if block.how != "lab":
            self._later += [(command, block.how) for command in started]
        if block.how == "lab":
            for command in started:
                self.ended(command)
        elif block.how.startswith("lab until"):
            self._wait_for(block.how.partition('"')[2].rstrip('"'), started)

    def _wait_for(self, words: str, started: Sequence[Command]) -> None:
        """Waits until a command of this page that goes on has printed `words`."""
        deadline, running = time.monotonic() + LIMIT_S, [command for command, _ in self._later]
        while not any(words in command.stdout for command in running):
            for command in started:
                if command.ended or time.monotonic() > deadline:
                    everything = "\n".join(map(self._told, self._titles))
                    raise AssertionError(f"nobody has said {words!r}:\n{everything}")
            time.sleep(0.02)

    def ended(self, command: Command) -> None:
        """Waits for the end of a command, which must be good."""
        code = command.wait()
        assert code == 0, f"it ended with {code}: {self._told(command)}"

    def _told(self, command: Command) -> str:
        return f"{self._titles[command]}:\n{command.stdout[-1500:]}\n{command.stderr[-3000:]}\n"

    def start(self, machine: str, text: str, title: str) -> Command:
        """Starts the lines of a block on a machine."""
        env, lines = self._exports[machine], made_smaller(text, self._page)

        def program(_: list[str]) -> int:
            return shell.run(lines, {**os.environ, **env}, partial(made_smaller, page=self._page))

        def enter() -> None:
            self._up.enter(machine)

        folder = self._up.folder / "printed" / str(len(self._titles))
        command = Command(folder, program=program, enter=enter)
        self._titles[command] = title
        return command


def with_options(text: str, options: Sequence[str]) -> str:
    """`text` with other values of some options and variables."""
    for option, value in re.findall(r"(--[\w-]+ |\w+=)(\S+)", " ".join(options)):
        text, count = re.subn(rf"(?<!\S){option}\S+", option + value, text)
        assert count, f"{option} is not in the block"
    return text
