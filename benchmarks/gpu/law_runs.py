"""Runs of the part `law`: the text, and a training of simulated replicas on this device."""

import copy
import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from benchmarks.gpu.common import Job, synchronize
from benchmarks.gpu.olmo2 import OLMo2, Shape
from benchmarks.gpu.twin import corpus
from benchmarks.size_law import optimizers
from benchmarks.size_law.predict import Expected
from benchmarks.size_law.sizes import (
    BYTES,
    CONTEXT,
    HEADS,
    LAYERS,
    PREDICTED,
    ROUND,
    WINDOW,
    Size,
)
from torch import Tensor

import detonation as dt
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.core.schemes import Scheme, scheme
from detonation.data.packages import cache_dir
from detonation.data.text import TextBlocks, hold_out

TINY, TINY_CONTEXT = Size("tiny", 32, 64, 1), 16
JUDGED = 1152
"""Held-out blocks of which a loss is the mean."""
AT_ONCE = 128
"""Held-out blocks of one forward pass."""


class TimeUp(RuntimeError):
    """The time of the part is up in the middle of a run."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What all runs train.

    Args:
        text: Digest of the text.
        train, judge: Blocks of it, `[blocks, context]` bytes.
    """

    size: Size
    text: str
    train: Tensor
    judge: Tensor

    @classmethod
    def of(cls, job: Job) -> "Study":
        """The text of the law if it was fetched on this machine, else the repository's own."""
        fetched = cache_dir() / "size-law" / "english.txt"
        raw = corpus()
        if fetched.exists() and not job.tiny:
            raw = bytearray(fetched.read_bytes())
        text = torch.frombuffer(raw, dtype=torch.uint8)
        name = hashlib.sha256(raw).hexdigest()[:12]
        size, context, judged = PREDICTED[0], CONTEXT, JUDGED
        if job.tiny:
            size, context, judged = TINY, TINY_CONTEXT, 8
        train, held_out = (TextBlocks(part, context).ids for part in hold_out(text))
        return cls(size, name, train.to(job.device), held_out[:judged].to(job.device))

    @property
    def name(self) -> dict[str, str]:
        """What rows of this study have in common."""
        return {"size": self.size.name, "text": self.text}

    @property
    def context(self) -> int:
        return self.train.shape[1]

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.size.batch * self.context

    def model(self, device: torch.device, seed: int) -> OLMo2:
        torch.manual_seed(seed)
        shape = Shape(self.size.hidden, LAYERS, self.size.feed_forward, BYTES, HEADS)
        with device:
            return OLMo2(shape, self.context - 1)

    def order(self, seed: int) -> Tensor:
        """The blocks in the order in which a seed trains them, again and again."""
        drawn = torch.Generator().manual_seed(seed)
        return torch.randperm(len(self.train), generator=drawn).to(self.train.device)

    def batch(self, order: Tensor, step: int, replica: int, replicas: int) -> Tensor:
        """The blocks of a replica in a step."""
        part = self.size.batch // replicas
        first = step * self.size.batch + replica * part
        at = torch.arange(first, first + part, device=order.device) % len(order)
        return self.train[order[at]].long()

    def loss(self, model: OLMo2) -> float:
        """The mean over the held-out blocks."""
        with torch.no_grad():
            found = [model(blocks.long()) * len(blocks) for blocks in self.judge.split(AT_ONCE)]
        return float(torch.stack(found).sum()) / len(self.judge)


@dataclasses.dataclass
class Trained:
    """What a run found. curve: losses after the last rounds. step_s: without its first round."""

    curve: list[tuple[int, float]]
    step_s: float
    bytes_sent: int

    @property
    def loss(self) -> float:
        return statistics.fmean(loss for _, loss in self.curve[-WINDOW:])


def trained(job: Job, study: Study, case: Expected, seed: int, steps: int) -> Trained:
    """Trains one run.

    Raises:
        TimeUp: The time of the part was up before its end.
    """
    started, order = study.model(job.device, seed), study.order(seed)
    judged = {steps - ROUND * number for number in range(WINDOW)}

    def act(communicator: SimulatedCommunicator) -> Trained:
        replica, replicas = communicator.replica, communicator.size()
        model = copy.deepcopy(started)
        base, chosen = built(case.sets)
        optimizer = dt.replicate(base(model), model, communicator, chosen)
        curve = list[tuple[int, float]]()
        began, seconds = time.monotonic(), 0.0
        for step in range(steps):
            if replica == 0 and job.left_s() < 0:
                raise TimeUp(f"after {step:,} of {steps:,} steps")
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first_lr", group["lr"]) * rate(step, steps)
            with torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=job.on_gpu):
                loss = model(study.batch(order, step, replica, replicas))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == steps:
                synchronize(job.device)
                seconds = time.monotonic() - began
            if replica == 0 and step + 1 in judged:
                curve.append((step + 1, study.loss(model)))
            if step + 1 == ROUND:  # what is built in the first round is no part of a step
                synchronize(job.device)
                began = time.monotonic()
        return Trained(curve, seconds / max(1, steps - ROUND), optimizer.stats.bytes_sent)

    return simulate_replicas(act, case.replicas)[0]


def rate(step: int, steps: int) -> float:
    """Share of the learning rate: it rises for a twentieth, and falls by a cosine to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def built(sets: Iterable[str]) -> tuple[Any, Scheme]:
    """Optimizer, still without its parameters, and scheme of a run's settings."""
    found: dict[str, dict[str, Any]] = {"scheme": {}, "optimizer": {}}
    for each in sets:
        key, _, value = each.partition("=")
        part, _, name = key.partition(".")
        found[part][name] = parsed(value)
    chosen = scheme(found["scheme"].pop("name"), found["scheme"])
    made = getattr(optimizers, found["optimizer"].pop("name").rpartition(":")[2])

    def base(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = made([{"params": list(model.parameters())}], **found["optimizer"])
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    return base, chosen


def parsed(value: str) -> Any:
    """A value as TOML writes it: a number, a list, true or false; else the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value
