"""The outer optimizer that moves the anchor, and one replica's own share of its next step."""

import torch
from torch import Tensor

from detonation.core.schemes.scheme import Outer


class OuterSGD:
    """A flat, and the SGD that moves it by the updates that arrive.

    Shapes: `[rows, chunk]` fp32.
    """

    def __init__(self, flat: Tensor, outer: Outer) -> None:
        self._parameter = torch.nn.Parameter(flat)
        self.flat = self._parameter.detach()
        self._sgd = torch.optim.SGD([self._parameter], outer.lr, outer.momentum, nesterov=outer.nesterov)
        if outer.momentum:  # from the start, so that there is one state to save and to load, before a round and after
            self._sgd.state[self._parameter]["momentum_buffer"] = torch.zeros_like(flat)

    def step(self, update: Tensor) -> None:
        """Takes one step on `update` as the gradient.

        Shapes: `[rows, chunk]`.
        """
        self._parameter.grad = update
        self._sgd.step()
        self._parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state by kind.

        Shapes: `[rows, chunk]` each.
        """
        return dict(self._sgd.state[self._parameter])


class EagerStart:
    """The start of this replica's round: the anchor plus this replica's own share of the outer step in flight.

    An outer step is linear in the messages of the replicas, and so the sum of a share of each. The own share is known
    at once, with a momentum of its own; the others' shares come with the message (Kale et al., arXiv 2502.12996, where
    each replica holds the whole sum instead of an anchor that all agree on).

    Shapes: `[rows, chunk]` fp32.
    """

    def __init__(self, anchor: Tensor, outer: Outer, replicas: int) -> None:
        self.flat = anchor.clone()
        self._share, self._replicas = OuterSGD(torch.zeros_like(anchor), outer), replicas

    def advance(self, anchor: Tensor, own_update: Tensor) -> None:
        """Moves to where `own_update` alone would move the anchor.

        Shapes: `[rows, chunk]` each.
        """
        self._share.flat.zero_()
        self._share.step(own_update / self._replicas)
        torch.add(anchor, self._share.flat, out=self.flat)

    def state(self) -> dict[str, Tensor]:
        """Its flats by kind.

        Shapes: `[rows, chunk]` each.
        """
        return {"start": self.flat} | {f"share_{kind}": flat for kind, flat in self._share.state().items()}
