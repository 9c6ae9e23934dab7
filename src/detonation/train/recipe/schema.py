"""The configuration of a run as frozen dataclasses. A recipe has the same structure in TOML."""

import math
from dataclasses import dataclass, field
from typing import Any

from detonation.choices import unknown
from detonation.link_speed import SLOW_BACKENDS, LinkSpeed
from detonation.wire.wire import ShardWire

Table = dict[str, Any]

LOGGERS = ("tensorboard", "trackio", "wandb", "web")
"""Allowed names in `train.loggers`. The forms "web:PORT" and "package.module:function" are also
allowed.
"""


def require(holds: bool, setting: str, value: object, allowed: str) -> None:
    """Raises `ValueError` unless `holds`. The message names the setting, its value and the allowed
    values.
    """
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
        embedding_lr_ratio: Learning rate of embeddings, output layer, norms and biases, divided by
            `lr`; above 0. Tune it for each optimizer: the best value was 30 for AdamW, with a third
            of its best single `lr`, and 0.3 for Muon (docs/findings.md).
    """

    name: str
    lr: float
    arguments: Table = field(default_factory=dict)
    embedding_lr_ratio: float = 1.0

    def __post_init__(self) -> None:
        ratio = self.embedding_lr_ratio
        require(0 < self.lr < math.inf, "optimizer.lr", self.lr, "a finite number above 0")
        require(
            0 < ratio < math.inf, "optimizer.embedding_lr_ratio", ratio, "a finite number above 0"
        )


def spelled_optimizer(chosen: OptimizerConfig) -> str:
    """Returns the optimizer and its learning rates as text.

    >>> spelled_optimizer(OptimizerConfig("AdamW", 1e-3, embedding_lr_ratio=30.0))
    'AdamW at lr 0.001, embeddings, norms and output layer at 0.03'
    """
    text = f"{chosen.name} at lr {chosen.lr:g}"
    if chosen.embedding_lr_ratio != 1:
        second = chosen.embedding_lr_ratio * chosen.lr
        text += f", embeddings, norms and output layer at {second:g}"
    return text


@dataclass(frozen=True)
class ScheduleConfig:
    """Schedule of the learning rate. The learning rate rises linearly over `warmup` steps. Under
    "cosine" and "linear" it then falls to `floor` * lr at the end of the run.

    Args:
        name: "cosine", "linear", "step" (falls at the `milestones` only) or "constant".
        warmup: Steps of the rise.
        floor: The part of lr that is left at the last step, from 0 to 1; for "cosine" and "linear".
        milestones: Shares of the run, in rising order, each above 0 and below 1. After each of them
            "step" multiplies lr by `gamma`.
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
        milestones = list(self.milestones)
        rising = milestones == sorted({*milestones}) and all(0 < m < 1 for m in milestones)
        allowed = "rising numbers above 0 and below 1"
        require(rising, "schedule.milestones", milestones, allowed)
        require(0 < self.gamma < 1, "schedule.gamma", self.gamma, "above 0 and below 1")
        require(self.warmup >= 0, "schedule.warmup", self.warmup, "at least 0")
        require(0 <= self.floor <= 1, "schedule.floor", self.floor, "within [0, 1]")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training loop: its length, its batches, and its checks.

    Args:
        batch_size: Examples per process and micro-batch.
        steps: Steps of the optimizer; 0 for as many as `epochs` take.
        epochs: Passes over the training examples, instead of `steps`. The start of the run converts
            them to steps.
        accumulate: Micro-batches per step.
        constant_batch: When replicas of an elastic run are lost or join, a step keeps its number of
            examples, and the present replicas divide these examples. If false, or with `balance`,
            each replica keeps its own number of examples.
        init_from: Directory of a run, a checkpoint or an exported model; the run starts with its
            weights, and with a new optimizer and new memories. "" starts with the weights of
            `model`.
        clip: Largest global norm of the gradient after the exchange; 0 turns clipping off.
        balance: Slow replicas take fewer local steps per round, so that all replicas end the round
            together. Only for schemes with rounds.
        autocast: "bf16" computes forward and backward in bf16 on accelerators; "" uses the
            precision of the weights.
        checkpoint_activations: Keep only the inputs of each layer, and recompute the rest in
            backward. This saves memory, but takes about a third more time.
        compile: Backend of torch.compile for the layers, such as "inductor"; "" does not compile.
        log_every: Steps between printed lines.
        validate_every: Steps between validations; 0 validates at the end only.
        validation_batches: Batches of `batch_size` in a validation.
        bleu_sentences: Held-out sentences that are translated greedily at the end, for `val_bleu`;
            0 for none. Needs sacrebleu.
        checkpoint_every: Steps between checkpoints; 0 saves at the end only.
        keep: Number of newest checkpoints to keep.
        non_finite: If the gradient of a replica is not finite: "stop" the run, or "skip" the
            contribution of the replica.
        verify_every: Steps between comparisons of the state that replicas share; 0 never compares.
        on_desync: If the shared state of replicas differs: "stop" the run, or "repair" the state.
        loggers: Trackers that get each step, in addition to `metrics.jsonl`.
        log_updates: Keep the agreed messages of each step since the last two checkpoints, for
            --resume and `follow DIR`.
        publish: "HOST:PORT" at which `detonation follow` reads the weights during training; shard s
            uses PORT + s. Needs DETONATION_TOKEN or DETONATION_TOKEN_FILE in the environment.
            "" publishes nothing.

    Raises:
        ValueError: A value is out of range.
    """

    batch_size: int
    steps: int = 0
    epochs: float = 0.0
    accumulate: int = 1
    constant_batch: bool = True
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
            zero = "off"
            if name.endswith("_every"):
                zero = "only at the end"
            value = getattr(self, name)
            require(0 <= value < math.inf, f"train.{name}", value, f"at least 0 (0 = {zero})")
        require(self.epochs < 1e9, "train.epochs", self.epochs, "below 1e9")
        _require_one_of("train.non_finite", self.non_finite, "stop", "skip")
        _require_one_of("train.on_desync", self.on_desync, "stop", "repair")
        if self.on_desync == "repair":
            allowed = "at least 1 to repair"
            require(self.verify_every >= 1, "train.verify_every", self.verify_every, allowed)
        allowed = "at least 0 (0 = never)"
        require(self.verify_every >= 0, "train.verify_every", self.verify_every, allowed)
        for name in self.loggers:
            if ":" not in name and name not in LOGGERS:
                raise unknown("logger", name, LOGGERS)
        _require_one_of("train.autocast", self.autocast, "", "bf16")

    @property
    def keeps_batch(self) -> bool:
        """True if a step of an elastic run keeps its number of examples when replicas are lost or
        join.
        """
        return self.constant_batch and not self.balance


def _require_one_of(setting: str, value: str, first: str, second: str) -> None:
    require(value in (first, second), setting, value, f"{first!r} or {second!r}")


@dataclass(frozen=True)
class MeshConfig:
    """The numbers of replicas and shards. `replicas` is the number of copies of the model; a copy
    usually lies on one node. `shards` is the number of parts of each copy; a part usually lies on
    one accelerator.

    Args:
        replicas: Copies of the model.
        shards: Parts of each copy.
        link: Emulated speed of the links between nodes, such as "100mbit,5ms"; "" emulates none.
        shard_nodes: Nodes of one copy; above 1 its shards communicate between nodes.
        shard_weights: Weights between the nodes of a copy: "4bit" or "8bit" differences, or "fp32"
            values.
        shard_gradients: Gradients between the nodes of a copy: "4bit" or "8bit" with error
            feedback, or "fp32".
        slow_backend: "gloo" sends messages between replicas over TCP, from host memory. Use it if
            NCCL cannot connect the nodes; NCCL still connects the ranks of a node. "" uses the
            backend of the device.
        elastic: Continue without a lost replica, in the same processes, over gloo.
        min_replicas: The run ends if fewer replicas remain.
        meet: "HOST:PORT" at which the replicas of an elastic run meet, or an odd number of such
            addresses, separated by commas; "" for one machine.
        nodes: Ranks of each node, if nodes have different numbers of ranks, such as [4, 2]; each
            node is then a replica.

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
        known = self.slow_backend in ("", *SLOW_BACKENDS)
        require(known, "mesh.slow_backend", self.slow_backend, '"gloo" or ""')
        require(self.replicas >= 1, "mesh.replicas", self.replicas, "at least 1")
        require(self.shards >= 1, "mesh.shards", self.shards, "at least 1")
        if self.nodes:
            self._derive_from_nodes()
        enough = 1 <= self.min_replicas <= self.replicas
        require(enough, "mesh.min_replicas", self.min_replicas, "from 1 to replicas")
        plain = (self.min_replicas, self.meet) == (1, "")
        allowed = "true with mesh.min_replicas or mesh.meet"
        require(self.elastic or plain, "mesh.elastic", False, allowed)
        if self.link:
            LinkSpeed.parse(self.link)
        fits = self.shard_nodes >= 1 and self.shards % self.shard_nodes == 0
        divisor = f"a divisor of the {self.shards} shards"
        require(fits, "mesh.shard_nodes", self.shard_nodes, divisor)
        if self.shard_nodes > 1:
            self.shard_wire  # noqa: B018  (raises for invalid values)
            return
        for key in ("shard_weights", "shard_gradients"):
            default = type(self).__dataclass_fields__[key].default
            allowed = f"{default!r} with mesh.shard_nodes = 1, where nothing crosses a link"
            require(getattr(self, key) == default, f"mesh.{key}", getattr(self, key), allowed)

    def _derive_from_nodes(self) -> None:
        nodes = [*self.nodes]
        require(min(nodes) >= 1, "mesh.nodes", nodes, "at least 1 each")
        conflict = self.elastic or bool(self.link) or self.shard_nodes > 1
        require(not conflict, "mesh.nodes", nodes, "left out with elastic, link or shard_nodes")
        object.__setattr__(self, "replicas", len(nodes))
        # a rank of the smallest node sends the most bytes, so `shards` is the size of that node
        object.__setattr__(self, "shards", min(nodes))

    @property
    def sizes(self) -> list[int]:
        """The number of ranks of each replica."""
        return [*self.nodes] or [self.shards] * self.replicas

    @property
    def shard_wire(self) -> ShardWire | None:
        """The compressed communication between the nodes of one replica; None if each replica is on
        one node.
        """
        if self.shard_nodes == 1:
            return None
        return ShardWire(self.shard_weights, self.shard_gradients, self.shard_nodes, link=self.link)


def described_mesh(mesh: MeshConfig) -> str:
    """Describes the replicas and shards of a mesh.

    >>> described_mesh(MeshConfig(2, 4)), described_mesh(MeshConfig(nodes=(4, 2)))
    ('2 replicas x 4 shards', '2 replicas of [4, 2] shards')
    """
    if mesh.nodes:
        return f"{mesh.replicas} replicas of {[*mesh.nodes]} shards"
    return f"{mesh.replicas} replicas x {mesh.shards} shards"


@dataclass(frozen=True)
class PeersConfig:
    """Sets when a rank counts as lost: after `silence_s` seconds without a heartbeat of this rank.

    Args:
        silence_s: Seconds without a heartbeat, at least 1. A run adds the transfer time of the
            largest message.
        lowest_bits_per_s: Rate of the slowest acceptable link, from which the transfer time of the
            largest message is computed.
    """

    silence_s: float = 15.0
    lowest_bits_per_s: float = 10e6

    def __post_init__(self) -> None:
        require(1 <= self.silence_s < math.inf, "peers.silence_s", self.silence_s, "at least 1")
        rate = self.lowest_bits_per_s
        require(rate > 0, "peers.lowest_bits_per_s", rate, "above 0")


@dataclass(frozen=True)
class LevelConfig:
    """One tier of the network, and the scheme with which the replicas of this tier exchange.

    Args:
        axis: Name of the tier, such as "rack".
        replicas: Number of replicas in this tier; the product over all tiers is `mesh.replicas`.
    """

    axis: str
    replicas: int
    scheme: Choice


@dataclass(frozen=True)
class Config:
    """The configuration of one run, with all defaults filled in.

    `levels` lists the tiers of the network, the innermost tier first. `mesh.replicas` is the
    product of the replicas of all tiers.
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
        if not one:
            allowed = "false: the log needs one level whose scheme exchanges messages"
            require(not self.train.log_updates, "train.log_updates", True, allowed)
            publish = self.train.publish
            require(
                not publish,
                "train.publish",
                publish,
                '"": a feed needs one level whose scheme exchanges messages',
            )
        if self.scheme.name == "none":
            allowed = "false: the outermost level exchanges nothing"
            require(not self.mesh.elastic, "mesh.elastic", True, allowed)
        last = self.levels[-1].replicas
        least = self.mesh.min_replicas
        allowed = f"from 1 to {last}, the replicas of the outermost level"
        require(least <= last, "mesh.min_replicas", least, allowed)
        nodes = [*self.mesh.nodes]
        if len(self.levels) > 1 or self.scheme.name == "auto":
            require(not nodes, "mesh.nodes", nodes, "left out with several levels or scheme auto")
        assert math.prod(level.replicas for level in self.levels) == self.mesh.replicas

    @property
    def scheme(self) -> Choice:
        """The scheme of the outermost level, whose links are the slowest."""
        return self.levels[-1].scheme

    @property
    def nodes_inside(self) -> int:
        """Number of nodes in each replica of the outermost level. An elastic run that loses one of
        these nodes loses the whole replica.
        """
        return self.mesh.replicas // self.levels[-1].replicas

    @property
    def schemes(self) -> str:
        """Names of the schemes, the innermost level first, such as `full+demo+diloco`."""
        return "+".join(level.scheme.name for level in self.levels)
