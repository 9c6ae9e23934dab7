"""The configuration of a run: frozen dataclasses are the single truth, TOML is their spelling."""

import math
from dataclasses import dataclass, field
from typing import Any

from detonation.choices import unknown
from detonation.link_speed import SLOW_BACKENDS, LinkSpeed
from detonation.wire.wire import ShardWire

Table = dict[str, Any]

LOGGERS = ("tensorboard", "trackio", "wandb", "web")
"""Valid names in `train.loggers`, besides "web:PORT" and "package.module:function";
`output/trackers.py` opens them."""


def require(holds: bool, setting: str, value: object, allowed: str) -> None:
    """Raises the `ValueError` that names a setting, its value and the allowed ones, unless `holds`."""
    if not holds:
        raise ValueError(f"{setting} is {value!r}, but must be {allowed}")


@dataclass(frozen=True)
class Choice:
    """A scheme, model or data set by name, with its own arguments."""

    name: str
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name, with its own arguments.

    Args:
        name: A class of torch.optim, `SignSGD`, `Muon` or "package.module:function".
        lr: The largest learning rate of the schedule, above 0.
    """

    name: str
    lr: float
    arguments: Table = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, "optimizer.lr", self.lr, "a finite number above 0")


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of lr: rises linearly over `warmup` steps, then falls to `floor` * lr at the
    last step.

    Args:
        name: "cosine", "linear", "step" (falls at the `milestones` only) or "constant".
        warmup: Steps of the rise.
        floor: The part of lr that is left at the last step, from 0 to 1; for "cosine" and "linear".
        milestones: Shares of the run after which "step" multiplies lr by `gamma`, rising, each
            above 0 and below 1.
        gamma: The factor at each milestone, above 0 and below 1.
    """

    name: str = "cosine"
    warmup: int = 0
    floor: float = 0.1
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in ("constant", "cosine", "linear", "step"):
            raise unknown("schedule", self.name, ("constant", "cosine", "linear", "step"))
        rising = list(self.milestones) == sorted({*self.milestones}) and all(
            0 < m < 1 for m in self.milestones
        )
        require(
            rising,
            "schedule.milestones",
            list(self.milestones),
            "rising numbers above 0 and below 1",
        )
        require(0 < self.gamma < 1, "schedule.gamma", self.gamma, "above 0 and below 1")
        require(self.warmup >= 0, "schedule.warmup", self.warmup, "at least 0")
        require(0 <= self.floor <= 1, "schedule.floor", self.floor, "within [0, 1]")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop: its length, its batches, and its checks.

    Args:
        batch_size: Examples per process and micro-batch.
        steps: Steps of the optimizer; 0 for as many as `epochs` take.
        epochs: Passes over the training examples, in the place of `steps`; the run keeps the steps
            that they take.
        accumulate: Micro-batches per step.
        init_from: Directory of a run, a checkpoint or an exported model whose weights the run
            begins with; the optimizer and the memories of the replicas are new. "" begins with
            those of the model.
        clip: Largest global norm of the gradient after the exchange; 0 turns clipping off.
        balance: Slow replicas take fewer local steps per round, so that all end it together: for
            schemes of rounds.
        autocast: "bf16" computes forward and backward in it, on accelerators; "" in the precision
            of the weights.
        checkpoint_activations: Keep the inputs of each layer alone, and compute the rest again in
            backward: less memory for about a third more time.
        compile: A backend of torch.compile for the layers, such as "inductor"; "" runs them as they
            are.
        log_every: Steps between lines on the screen.
        validate_every: Steps between validations; 0 validates at the end only.
        validation_batches: Batches of `batch_size` that a validation takes.
        bleu_sentences: Held-out sentences that the end of the run translates, greedily, for
            `val_bleu`; 0 for none. Needs sacrebleu.
        checkpoint_every: Steps between checkpoints; 0 saves at the end only.
        keep: Checkpoints that stay, the newest.
        non_finite: "stop" the run where a replica's gradient is not finite, or "skip" its
            contribution.
        verify_every: Steps between comparisons of the state that replicas share; 0 never compares.
        on_desync: "stop" the run where replicas differ in it, or "repair" it.
        loggers: Trackers that get each step, besides `metrics.jsonl`.
        log_updates: Keep each step's agreed messages since the last two checkpoints, for --resume
            and `follow DIR`.
        publish: "HOST:PORT" at which `detonation follow` finds the weights in training, shard s at
            PORT + s; it needs a token in the environment. "" publishes nothing.

    Raises:
        ValueError: A value is out of range.
    """

    batch_size: int
    steps: int = 0
    epochs: float = 0.0
    accumulate: int = 1
    init_from: str = ""
    clip: float = 0.0
    balance: bool = False
    autocast: str = ""
    checkpoint_activations: bool = False
    compile: str = ""
    log_every: int = 10
    validate_every: int = 0
    validation_batches: int = 16
    bleu_sentences: int = 0
    checkpoint_every: int = 0
    keep: int = 3
    non_finite: str = "stop"
    verify_every: int = 100
    on_desync: str = "stop"
    loggers: tuple[str, ...] = ()
    log_updates: bool = False
    publish: str = ""

    def __post_init__(self) -> None:
        require(self.steps >= 0, "train.steps", self.steps, "at least 1, or 0 with epochs")
        require(
            self.steps > 0 or self.epochs > 0,
            "train.steps",
            self.steps,
            "at least 1, or train.epochs above 0",
        )
        for name in ("batch_size", "accumulate", "log_every", "validation_batches", "keep"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        for name in ("epochs", "bleu_sentences", "validate_every", "checkpoint_every", "clip"):
            zero = "only at the end" if name.endswith("_every") else "off"
            value = getattr(self, name)
            require(0 <= value < math.inf, f"train.{name}", value, f"at least 0 (0 = {zero})")
        require(self.epochs < 1e9, "train.epochs", self.epochs, "below 1e9")
        require(
            self.non_finite in ("stop", "skip"),
            "train.non_finite",
            self.non_finite,
            "'stop' or 'skip'",
        )
        require(
            self.on_desync in ("stop", "repair"),
            "train.on_desync",
            self.on_desync,
            "'stop' or 'repair'",
        )
        least, why = (1, " to repair") if self.on_desync == "repair" else (0, " (0 = never)")
        require(
            self.verify_every >= least,
            "train.verify_every",
            self.verify_every,
            f"at least {least}{why}",
        )
        for name in self.loggers:
            if ":" not in name and name not in LOGGERS:
                raise unknown("logger", name, LOGGERS)
        require(self.autocast in ("", "bf16"), "train.autocast", self.autocast, "'' or 'bf16'")


@dataclass(frozen=True)
class MeshConfig:
    """`replicas` copies of the model (nodes), each cut into `shards` (accelerators in a node).

    Args:
        replicas: Copies of the model, usually nodes.
        shards: Parts of each copy, usually the accelerators of a node.
        link: Emulated speed of the links between nodes, such as "100mbit,5ms"; "" leaves the
            network as it is.
        shard_nodes: Nodes that the shards of one copy lie on; above 1 their traffic crosses a link
            between nodes.
        shard_weights: Weights between those nodes: "4bit" or "8bit" differences, or "fp32" as they
            are.
        shard_gradients: Gradients between those nodes: "4bit" or "8bit" with error feedback, or
            "fp32".
        slow_backend: "gloo" carries messages between replicas over TCP, from host memory, where
            NCCL cannot; NCCL serves the ranks of a node all the same. "" takes the backend of the
            device.
        elastic: Train on without a replica that is lost, in the same processes, over gloo.
        min_replicas: The run ends when fewer are left.
        meet: "HOST:PORT" where the replicas of an elastic run meet; "" on this machine alone.
        nodes: Ranks of each node where nodes have different numbers, such as [4, 2]; each is then a
            replica.

    Raises:
        ValueError: A value is out of range, or a setting would be ignored.
    """

    replicas: int = 2
    shards: int = 2
    link: str = ""
    shard_nodes: int = 1
    shard_weights: str = "fp32"
    shard_gradients: str = "fp32"
    slow_backend: str = ""
    elastic: bool = False
    min_replicas: int = 1
    meet: str = ""
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.slow_backend in ("", *SLOW_BACKENDS),
            "mesh.slow_backend",
            self.slow_backend,
            '"gloo" or ""',
        )
        require(self.replicas >= 1, "mesh.replicas", self.replicas, "at least 1")
        require(self.shards >= 1, "mesh.shards", self.shards, "at least 1")
        if self.nodes:
            require(min(self.nodes) >= 1, "mesh.nodes", [*self.nodes], "at least 1 each")
            taken = self.elastic or bool(self.link) or self.shard_nodes > 1
            require(
                not taken, "mesh.nodes", [*self.nodes], "left out with elastic, link or shard_nodes"
            )
            object.__setattr__(self, "replicas", len(self.nodes))
            object.__setattr__(self, "shards", min(self.nodes))  # a rank there has most to send
        require(
            1 <= self.min_replicas <= self.replicas,
            "mesh.min_replicas",
            self.min_replicas,
            "from 1 to replicas",
        )
        plain = (self.min_replicas, self.meet) == (1, "")
        require(
            self.elastic or plain, "mesh.elastic", False, "true with mesh.min_replicas or mesh.meet"
        )
        if self.link:
            LinkSpeed.parse(self.link)
        fits = self.shard_nodes >= 1 and self.shards % self.shard_nodes == 0
        require(
            fits, "mesh.shard_nodes", self.shard_nodes, f"a divisor of the {self.shards} shards"
        )
        if self.shard_nodes > 1:
            self.shard_wire  # noqa: B018  (refuses what it cannot be)
        for key in _SHARD_KEYS if self.shard_nodes == 1 else ():
            default = type(self).__dataclass_fields__[key].default
            allowed = f"{default!r} with mesh.shard_nodes = 1, where nothing crosses a link"
            require(getattr(self, key) == default, f"mesh.{key}", getattr(self, key), allowed)

    @property
    def sizes(self) -> list[int]:
        return [*self.nodes] or [self.shards] * self.replicas

    @property
    def shard_wire(self) -> ShardWire | None:
        """The compression between the nodes of one copy; None where a copy lies on one node."""
        if self.shard_nodes == 1:
            return None
        kinds = self.shard_weights, self.shard_gradients
        return ShardWire(*kinds, self.shard_nodes, link=self.link)


def described_mesh(mesh: MeshConfig) -> str:
    """The replicas and shards of a mesh in words.

    >>> described_mesh(MeshConfig(2, 4)), described_mesh(MeshConfig(nodes=(4, 2)))
    ('2 replicas x 4 shards', '2 replicas of [4, 2] shards')
    """
    return f"{mesh.replicas} replicas " + (
        f"of {[*mesh.nodes]} shards" if mesh.nodes else f"x {mesh.shards} shards"
    )


_SHARD_KEYS = ("shard_weights", "shard_gradients")
"""Keys of [mesh] that say something about copies on several nodes only."""


@dataclass(frozen=True)
class PeersConfig:
    """The limit after which a rank counts as lost: `silence_s` without a heartbeat.

    Args:
        silence_s: Seconds, at least 1; the time of the largest message comes on top.
        lowest_bits_per_s: The rate at which that time is reckoned: the slowest link that is still
            acceptable.
    """

    silence_s: float = 15.0
    lowest_bits_per_s: float = 10e6

    def __post_init__(self) -> None:
        require(1 <= self.silence_s < math.inf, "peers.silence_s", self.silence_s, "at least 1")
        require(
            self.lowest_bits_per_s > 0, "peers.lowest_bits_per_s", self.lowest_bits_per_s, "above 0"
        )


@dataclass(frozen=True)
class LevelConfig:
    """One tier of the network, and the scheme between its replicas.

    Args:
        axis: The name of the tier, such as "rack".
        replicas: Their number in this tier; the product over the tiers is the number of all.
    """

    axis: str
    replicas: int
    scheme: Choice


@dataclass(frozen=True)
class Config:
    """One run, fully resolved.

    `levels` go from the innermost tier of the network to the outermost; `mesh.replicas` is the
    product of theirs.
    """

    model: Choice
    data: Choice
    levels: tuple[LevelConfig, ...]
    optimizer: OptimizerConfig
    train: TrainConfig
    schedule: ScheduleConfig = ScheduleConfig()
    mesh: MeshConfig = MeshConfig()
    peers: PeersConfig = PeersConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, "seed", self.seed, "within [0, 2**31)")
        one = len(self.levels) == 1 and self.scheme.name != "none"
        require(
            one or not self.train.log_updates,
            "train.log_updates",
            True,
            "false: the log takes one level that agrees",
        )
        publish = self.train.publish
        require(
            one or not publish, "train.publish", publish, '"": a feed takes one level that agrees'
        )
        last, least = self.levels[-1].replicas, self.mesh.min_replicas
        agrees = self.scheme.name != "none"
        require(
            agrees or not self.mesh.elastic,
            "mesh.elastic",
            True,
            "false: the outermost level never agrees",
        )
        require(
            least <= last,
            "mesh.min_replicas",
            least,
            f"from 1 to {last}, the replicas of the outermost level",
        )
        plain = len(self.levels) == 1 and self.scheme.name != "auto"
        require(
            plain or not self.mesh.nodes,
            "mesh.nodes",
            [*self.mesh.nodes],
            "left out with several levels or auto",
        )
        assert math.prod(level.replicas for level in self.levels) == self.mesh.replicas

    @property
    def scheme(self) -> Choice:
        """The scheme of the outermost level, whose links are the slowest."""
        return self.levels[-1].scheme

    @property
    def nodes_inside(self) -> int:
        """The nodes of each replica of the outermost level, which an elastic run loses together."""
        return self.mesh.replicas // self.levels[-1].replicas

    @property
    def schemes(self) -> str:
        """The names of the schemes from the innermost level outwards: `full+demo+diloco`."""
        return "+".join(level.scheme.name for level in self.levels)
