"""The outer optimizer: what moves the anchor, and one replica's own share of its next step."""

import torch
from torch import Tensor

from detonation.core.schemes.scheme import Outer


class OuterSGD:
    """A flat, fp32 `[rows, chunk]`, and the SGD that moves it by what arrives."""

    def __init__(self, flat: Tensor, outer: Outer) -> None:
        self._parameter = torch.nn.Parameter(flat)
        self._sgd = torch.optim.SGD([self._parameter], outer.lr, outer.momentum, nesterov=outer.nesterov)
        if outer.momentum:  # from the start, so that there is one state to save and to load, before a round and after
            self._sgd.state[self._parameter]["momentum_buffer"] = torch.zeros_like(flat)

    @property
    def flat(self) -> Tensor:
        return self._parameter.detach()

    def step(self, update: Tensor) -> None:
        self._parameter.grad = update
        self._sgd.step()
        self._parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        return dict(self._sgd.state[self._parameter])


class Start:
    """Where this replica's round began: the anchor, and this replica's own share of the outer step on its way.

    An outer step is linear in what the replicas tell, and so the sum of a share of each. The own one is known at once,
    with a momentum of its own; those of the others come with the message (Kale et al., arXiv 2502.12996, where each
    replica keeps the whole sum instead of an anchor that all agree on).
    """

    def __init__(self, anchor: Tensor, outer: Outer, replicas: int) -> None:
        self.flat = anchor.clone()  # [rows, chunk]
        self._share, self._replicas = OuterSGD(torch.zeros_like(anchor), outer), replicas

    def follow(self, anchor: Tensor, told: Tensor) -> None:
        """From `anchor` to where what this replica `told` alone would move it."""
        self._share.flat.zero_()
        self._share.step(told / self._replicas)
        torch.add(anchor, self._share.flat, out=self.flat)

    def state(self) -> dict[str, Tensor]:
        return {"start": self.flat} | {f"share_{kind}": flat for kind, flat in self._share.state().items()}
