"""The examples of a step that one rank computes.

A step has as many examples as the ranks of the start compute: each of these *parts* has
`train.accumulate` batches of `train.batch_size`. The ranks that are there divide them.
"""

from collections.abc import Sequence

from torch import Tensor

from detonation.cluster.shares import MicroBatch
from detonation.data import batch, predictions
from detonation.train.loop.session import Session


def micro_batches_of_step(session: Session) -> Sequence[MicroBatch]:
    """The share of this rank in the next step."""
    train = session.config.train
    return session.world.share(train.batch_size * train.accumulate, train.batch_size)


def draw(session: Session, step: int, micro: MicroBatch) -> tuple[dict[str, Tensor], float]:
    """The examples of a micro-batch, and the weight of their mean loss in the mean of its batch.

    A batch is drawn whole, so its augmentation does not depend on the ranks that divide it.
    """
    train = session.config.train
    number, first = divmod(micro.examples.start, train.batch_size)
    part, turn = divmod(number, train.accumulate)
    whole = batch(
        session.data.train,
        seed=session.config.seed,
        step=step * train.accumulate + turn,
        part=part,
        parts=session.world.parts,
        size=train.batch_size,
    )
    if micro.weight and len(micro.examples) == train.batch_size:
        return whole, 1.0
    rows = slice(first, first + len(micro.examples))
    cut = {name: values[rows] for name, values in whole.items()}
    count = predictions(session.data.kind, cut)
    if not count:  # the mean over no predictions is not a number
        return whole, 0.0
    if not micro.weight:
        return cut, 0.0
    return cut, count / predictions(session.data.kind, whole)
