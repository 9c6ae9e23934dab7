"""Makes buffers equal on all replicas. Buffers are model state that no optimizer changes, such as
the running statistics of BatchNorm."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from detonation.choices import first_names
from detonation.core.agreement.desync import differences, repaired
from detonation.core.flat.tensors import bare_name, local
from detonation.core.flat.weight_hooks import compared
from detonation.core.link import Link
from detonation.core.replicator import Replicator

_log = logging.getLogger("detonation")


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of `model` that its state dict contains, by name.

    Example:
        >>> sorted(persistent_buffers(nn.BatchNorm1d(3)))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    modules = dict(model.named_modules())
    found = {}
    for name, buffer in model.named_buffers():
        owner, _, own_name = name.rpartition(".")
        if own_name not in modules[owner]._non_persistent_buffers_set:
            found[bare_name(name)] = buffer
    return found


class BufferSync:
    """Makes the persistent buffers of a model equal on all replicas. A floating-point buffer is set
    to the mean of the replicas' finite values, and any other buffer to the value that most replicas
    have.

    Running statistics of BatchNorm differ between replicas, because each replica sees other data.
    Evaluation uses these statistics, but training does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._warned = False

    @torch.no_grad()
    def __call__(self, replicators: Sequence[Replicator]) -> None:
        """Compares the buffers between the replicas of each level, one level after the other. Sets
        each buffer that differs to one value on all replicas. Collective.

        For each buffer, the comparison sends 8 bytes, which the link does not count. A buffer that
        differs is sent whole, and the link counts its bytes. The ranks of a node may have different
        buffers, as under tensor parallelism or without synchronised BatchNorm.
        """
        compared(self._model)
        buffers = {name: local(buffer) for name, buffer in persistent_buffers(self._model).items()}
        # All replicas have the same model. If this replica has no buffers, no replica has any.
        if not buffers:
            return
        links = {replicator.link: replicator.channel.runtime.device for replicator in replicators}
        for link, device in links.items():
            self._warn(_made_equal(link, buffers, device), link.replica == 0)

    def _warn(self, names: list[str], speaks: bool) -> None:
        if names and not self._warned and speaks:
            _log.warning(
                "buffers differ between replicas, so every comparison (verify_every) and"
                " synchronize() set them to their mean, or integers to the majority's value: %s;"
                " pass persistent=False to register_buffer to keep a buffer private",
                first_names(names, 4),
            )
        self._warned |= bool(names)


def _made_equal(link: Link, buffers: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Makes the buffers that differ between the replicas of `link` equal, and returns the names of
    these buffers."""
    keys = {}
    by_key = {}
    for name, buffer in buffers.items():
        key = f"{name} {tuple(buffer.shape)} {buffer.dtype}"
        keys[key] = name
        by_key[key] = buffer
    found = []
    for difference in differences(link, by_key, device):
        if difference.name not in keys:
            _log.warning(
                "%s: buffers have other names, shapes or dtypes on these replicas, so no buffer is"
                " made equal; build the same model on all replicas",
                difference,
            )
            continue
        name = keys[difference.name]
        buffer = buffers[name]
        if buffer.is_floating_point():
            buffer.copy_(_mean_of_finite(link, buffer, device))
        else:
            buffer.copy_(repaired(link, difference, buffer, device, apart=True))
        found.append(name)
    return found


def _mean_of_finite(link: Link, buffer: Tensor, device: torch.device) -> Tensor:
    """Returns the mean of `buffer` over the replicas, number by number. Each mean covers only the
    replicas on which the number is finite. If a number is finite on no replica, its sum over all
    replicas is returned instead of a mean.

    So nonfinite values in the batch of one replica do not spoil the statistics of other replicas. A
    number that is infinite on all replicas, such as the maximum of an empty set, stays infinite.
    """
    # without promote_types, because torch promotes no float8 type
    wide = {torch.float64: torch.float64}.get(buffer.dtype, torch.float32)
    values = buffer.to(device, wide).flatten()
    finite = values.isfinite()
    nothing = values.new_zeros(())
    # One collective, so that counts and sums cover the same replicas even if a replica is lost.
    # All ranks run this collective, whatever their values: ranks of a node may differ in values.
    parts = finite.to(values.dtype), values.where(finite, nothing), values.where(~finite, nothing)
    counts, sums, others = link.all_reduce(torch.stack(parts).flatten(), apart=True)().view(3, -1)
    return torch.where(counts > 0, sums / counts, others).view(buffer.shape)
