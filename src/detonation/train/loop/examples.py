"""The examples of a step that one rank computes.

A step consists of *parts*, one for each rank. Each part has `train.accumulate` batches of
`train.batch_size` examples. With `train.constant_batch` an elastic run keeps its number of parts:
after replicas were lost or joined, the current ranks divide the parts among themselves.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from detonation.cluster.shares import MicroBatch
from detonation.data import batch, predictions
from detonation.train.loop.session import Session


def micro_batches_of_step(session: Session) -> Sequence[MicroBatch]:
    """Returns the micro-batches that this rank computes in the next step."""
    train = session.config.train
    return session.world.share(train.batch_size * train.accumulate, train.batch_size)


def draws(session: Session, step: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yields the examples of each micro-batch of this rank, with a weight. The mean loss of a whole
    batch is the weighted sum of the mean losses of its micro-batches.

    A batch is always drawn whole, so that the augmentation of the batch does not depend on the
    ranks that divide the batch. A batch is drawn only once, because a stream can only be read
    forwards.
    """
    drawn = -1
    whole: dict[str, Tensor] = {}
    for micro in micro_batches_of_step(session):
        number, first = divmod(micro.examples.start, session.config.train.batch_size)
        if number != drawn:
            whole = _batch(session, step, number)
            drawn = number
        rows = slice(first, first + len(micro.examples))
        examples, weight = _part(session, whole, rows)
        yield examples, weight * (micro.weight > 0)


def _batch(session: Session, step: int, number: int) -> dict[str, Tensor]:
    train = session.config.train
    part, turn = divmod(number, train.accumulate)
    return batch(
        session.data.train,
        seed=session.config.seed,
        step=step * train.accumulate + turn,
        part=part,
        parts=session.world.parts,
        size=train.batch_size,
    )


def _part(
    session: Session, whole: dict[str, Tensor], rows: slice
) -> tuple[dict[str, Tensor], float]:
    """Returns the examples in `rows` of a batch, and their share of the batch's predictions."""
    if rows == slice(0, session.config.train.batch_size):
        return whole, 1.0
    cut = {name: values[rows] for name, values in whole.items()}
    count = predictions(session.data.kind, cut)
    if not count:  # the mean loss of 0 predictions is NaN, so use the whole batch with weight 0
        return whole, 0.0
    return cut, count / predictions(session.data.kind, whole)
