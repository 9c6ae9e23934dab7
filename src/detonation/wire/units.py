"""FSDP units of a model that is sharded over several nodes: the collectives between nodes, the
counters and the state of each unit.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from detonation.core.compute.checksum import checksum
from detonation.core.flat.tensors import largest_local_shape, local
from detonation.core.flat.weight_hooks import ON_COMPARISON, ON_MOVE
from detonation.core.flat.written import WrittenWeights
from detonation.core.link import Link
from detonation.core.optimizer import local_parameters, reshard
from detonation.wire.collectives import (
    WEIGHT_MOVES,
    BlockIntegers,
    DifferenceGather,
    ErrorFeedbackReduce,
)
from detonation.wire.wire import WIDTHS, ShardWire

_UNIT = "_detonation_shard_unit"
_log = logging.getLogger("detonation")


class ShardUnit:
    """The collectives between nodes of one FSDP unit, `module`. The object becomes an attribute of
    `module`.

    parameters: the unit's own parameters by name, in FSDP2's order, without parameters of nested
    units. in_node: the process group of this node; None if the node has one rank.
    """

    def __init__(
        self,
        module: FSDPModule,
        parameters: dict[str, nn.Parameter],
        wire: ShardWire,
        link: Link,
        in_node: dist.ProcessGroup | None,
    ) -> None:
        self.wire = wire
        self.link = link
        self.parameters = parameters
        codec = None
        if WIDTHS[wire.weights]:
            codec = BlockIntegers(WIDTHS[wire.weights])
        written = WrittenWeights({name: (parameters, name) for name in parameters})
        self.gather = DifferenceGather(
            link, in_node, codec, wire.resync_every, self.is_trained, written
        )
        module.set_custom_all_gather(self.gather)
        self.reduce: ErrorFeedbackReduce | None = None
        if WIDTHS[wire.gradients]:
            codec = BlockIntegers(WIDTHS[wire.gradients])
            self.reduce = ErrorFeedbackReduce(link, in_node, codec, self._trained_sizes)
            module.set_custom_reduce_scatter(self.reduce)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                # From torch 2.13 on, FSDP2 can send zeros in the place of missing gradients.
                # With these zeros, the messages of all steps are equally long.
                module.set_reduce_scatter_unused_params(True, recurse=False)
            self._watch_backward(module, self.reduce)
        setattr(module, _UNIT, self)
        self._hook_loading(cast(nn.Module, module))

    def _watch_backward(self, module: FSDPModule, reduce: ErrorFeedbackReduce) -> None:
        """From now on, each backward sets `reduce.lacks` to the parameters without a gradient. If
        no rank has a gradient for a parameter, backward also removes the zeros that FSDP2 puts in
        the place of this gradient.
        """
        group: Any = cast(Any, module)._get_fsdp_state()._fsdp_param_group
        reduces = group.post_backward

        def post_backward(*arguments: Any) -> Any:
            lacking = [each.sharded_param for each in group.fsdp_params if _lacks_gradient(each)]
            names = {id(parameter): name for name, parameter in self.parameters.items()}
            reduce.lacks = [names[id(parameter)] for parameter in lacking]
            hooks = []
            for parameter in (each for each in lacking if each.grad is None):
                hook = partial(_take_back, reduce, names[id(parameter)])
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter._post_accumulate_grad_hooks.move_to_end(hooks[-1].id, last=False)
            try:
                return reduces(*arguments)
            finally:
                reduce.lacks = ()
                for handle in hooks:
                    handle.remove()

        group.post_backward = post_backward

    def _hook_loading(self, module: nn.Module) -> None:
        """Makes the next exchange of weights exact after `load_state_dict` of a module of the
        unit.
        """

        def loaded(*_: object) -> None:
            # a unit that is still gathered would exchange nothing in its next forward pass
            reshard(unit)
            # loading with `assign=True` replaces parameters
            for name, (parameters, own_name) in places.items():
                if (now := parameters.get(own_name)) is not None:
                    self.parameters[name] = now
            self.gather.forget()

        unit = module
        own = {id(parameter): name for name, parameter in self.parameters.items()}
        places = {
            own[id(parameter)]: (each._parameters, name)
            for each in own_modules(module)
            for name, parameter in each._parameters.items()
            if id(parameter) in own
        }
        for each in own_modules(module):
            each.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, Tensor]:
        """Returns this rank's part of the unit's state, by `<kind>.<parameter>`. The state has two
        tensors for each parameter: this rank's shard of the reference (the weights as they were
        last gathered), and the residual (rounding errors of gradients).

        The counters of exchanges are stored under the name of the first parameter.

        Shapes: -> reference: the local shape; residual: `[nodes - 1, padded]`; counts: `[2]` int64.
        """
        found: dict[str, Tensor] = {}
        reference = self.gather.reference
        sizes = self.sizes()
        if reference is not None and reference.shape[1] == sum(sizes.values()):
            found[f"counts.{next(iter(sizes))}"] = self.gather.counts()
            pieces = torch.split(reference[self.link.replica], [*sizes.values()])
            for (name, parameter), piece in zip(self.parameters.items(), pieces, strict=True):
                shard = local(parameter)
                found[f"reference.{name}"] = piece[: shard.numel()].view(shard.shape)
        if self.reduce is not None:
            found |= {
                f"residual.{name}": piece for name, piece in self.reduce.by_parameter().items()
            }
        return found

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`. If the saved reference (the weights as they were last
        gathered) does not fit, the next exchange sends the weights without rounding. A saved
        residual that does not fit becomes zero.

        Collective.
        """
        self.gather.forget()
        counts = saved.get(f"counts.{next(iter(self.parameters))}")
        own = []
        for name, parameter in self.parameters.items():
            shard = local(parameter.detach())
            piece = saved.get(f"reference.{name}")
            if piece is None and not parameter.requires_grad:
                piece = shard  # a checkpoint may omit frozen weights, which are equal on all nodes
            if piece is not None and piece.shape == shard.shape:
                flat = piece.to(shard.device).reshape(-1)
                own.append(torch.nn.functional.pad(flat, (0, padded_numel(parameter) - len(flat))))
        types = {piece.dtype for key, piece in saved.items() if key.startswith("reference.")}
        if counts is not None and len(own) == len(self.parameters) and len(types) == 1:
            self.gather.restore(torch.cat([piece.to(next(iter(types))) for piece in own]), counts)
        if self.reduce is not None:
            residual = {
                k.removeprefix("residual."): piece
                for k, piece in saved.items()
                if k.startswith("residual.")
            }
            self.reduce.load(residual)

    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters.values())

    def sizes(self) -> dict[str, int]:
        """Returns, for each parameter, the number of elements of a rank's shard, padded as in
        FSDP2.
        """
        return {name: padded_numel(parameter) for name, parameter in self.parameters.items()}

    def _trained_sizes(self) -> dict[str, int]:
        return {
            name: size for name, size in self.sizes().items() if self.parameters[name].requires_grad
        }


def _lacks_gradient(fsdp_parameter: Any) -> bool:
    """True if FSDP2 would send zeros as the gradient of this parameter."""
    whole = getattr(fsdp_parameter, "_unsharded_param", None)
    return (
        whole is not None
        and whole.requires_grad
        and whole.grad is None
        and fsdp_parameter.unsharded_accumulated_grad is None
    )


def _take_back(reduce: ErrorFeedbackReduce, name: str, parameter: Tensor) -> None:
    if name in reduce.unused:
        parameter.grad = None


def own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a unit and the modules inside it, but no modules of nested units."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_modules(child)


def padded_numel(parameter: Tensor) -> int:
    """Returns the number of elements that a rank's shard of `parameter` occupies in FSDP2's
    messages. This is the size of the largest shard.
    """
    return math.prod(largest_local_shape(parameter))


def join_units(
    model: nn.Module,
    modules: Sequence[FSDPModule],
    wire: ShardWire,
    link: Link,
    in_node: dist.ProcessGroup | None,
) -> None:
    """Adds the collectives between nodes to each FSDP unit of `model`; inner units come first. See
    `ShardUnit`.
    """
    names = {id(parameter): name for name, parameter in local_parameters(model).items()}
    for module in modules:
        own = [
            parameter
            for parameter in cast(nn.Module, module).parameters()
            if id(parameter) in names
        ]
        if own:  # FSDP2 sends no messages for a unit without own parameters
            ShardUnit(
                module,
                {names.pop(id(parameter)): parameter for parameter in own},
                wire,
                link,
                in_node,
            )


def resync_weights(model: nn.Module) -> None:
    """Makes the next exchange of weights between nodes exact. All ranks must call this function
    after a write to the weights outside of an optimizer step.

    `load_checkpoint` makes this call, and so does `load_state_dict` of the model or of a module in
    it. A model without compressed communication between shards (a shard wire) needs no such call.

    Example:
        >>> resync_weights(nn.Linear(2, 2))
    """
    # a unit that is still gathered would exchange nothing in its next forward pass
    reshard(model)
    for unit in shard_units(model):
        unit.gather.forget()


def shard_units(model: nn.Module) -> list[ShardUnit]:
    found = (getattr(module, _UNIT, None) for module in model.modules())
    return [unit for unit in found if isinstance(unit, ShardUnit)]


def shard_bytes_sent(model: nn.Module) -> int:
    """Returns how many bytes this rank has sent through the shard wire, the compressed
    communication between the nodes of a replica. Returns 0 without a shard wire.

    Gradients in fp32 use torch's own reduce-scatter, so their bytes are not counted.

    Example:
        >>> shard_bytes_sent(nn.Linear(2, 2))
        0
    """
    return sum(link.bytes_sent for link in {unit.link for unit in shard_units(model)})


def shard_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state of all units on this rank, by `<kind>.<parameter>`; see
    `ShardUnit.state`.
    """
    return {key: tensor for unit in shard_units(model) for key, tensor in unit.state().items()}


def load_shard_state(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restores the result of `shard_state`; see `ShardUnit.load`. Collective."""
    for unit in shard_units(model):
        unit.load(
            {
                key: tensor
                for key, tensor in saved.items()
                if key.partition(".")[2] in unit.parameters
            }
        )


@torch.no_grad()
def mend_references(model: nn.Module) -> None:
    """Compares the references (the common copies of gathered weights) of all nodes. If the
    references of some weights differ, makes the next exchange of these weights exact. Collective.

    The shards store the weights. So a reference that is damaged in RAM or on the network costs only
    one exact exchange. A write to frozen weights on any rank costs an exact exchange, too. After
    this call the next gather exchanges the weights, because the caller may have completed a round
    or repaired weights before.

    The call sends 16 bytes per unit, which are not counted as sent.
    """
    units = [unit for unit in shard_units(model) if unit.gather.reference is not None]
    if not units:
        return
    WEIGHT_MOVES()
    sums = torch.stack([checksum(cast(Tensor, unit.gather.reference)) for unit in units])
    written = torch.tensor(
        [bool(unit.gather.weights.found()) for unit in units], dtype=torch.int64, device="cpu"
    )
    both = torch.stack([sums, written.to(sums.device)])
    table = units[0].link.collect(both.view(-1)).view(-1, *both.shape)  # shape [nodes, 2, units]
    rewritten = table[:, 1].any(0).tolist()
    for unit, differs, anew in zip(
        units, (table[:, 0] != table[0, 0]).any(0).tolist(), rewritten, strict=True
    ):
        if differs or (anew and not unit.is_trained()):
            unit.gather.forget()
        if differs:
            _log.warning(
                "nodes held different references of the weights %s: the next exchange of these"
                " weights is exact",
                next(iter(unit.parameters)),
            )


ON_MOVE.append(WEIGHT_MOVES)
ON_COMPARISON.append(mend_references)
