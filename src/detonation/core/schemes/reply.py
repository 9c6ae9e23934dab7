"""The codec with which the owner of rows answers all replicas in a two-stage all-reduce."""

from dataclasses import replace

from detonation.core.codec.codec import Codec
from detonation.core.codec.precision import PRECISIONS
from detonation.core.codec.selection import Everything, TopK


def reply_codec(message: Codec, replicas: int) -> Codec:
    """The codec of the answers to messages of the codec `message` from `replicas` replicas.

    Where the selection is the sender's own, the messages hold other coefficients each. An answer of one message's size
    would leave most of them in the server residual, to be sent when they are old, which costs up to a third of loss.
    The answer therefore holds as many coefficients per row as may have arrived, at most a quarter of the row or four
    messages, in two bits each (research/log.md). Under a shared selection it is like a message.

    Example:
        >>> from detonation import demo
        >>> reply_codec(demo(topk=1).codec, replicas=4).selection, reply_codec(demo(topk=4).codec, 4).selection
        (TopK(topk=4, chunk=64, shared=False, period=0), TopK(topk=16, chunk=64, shared=False, period=0))
    """
    k, chunk = message.selection.k, message.selection.chunk
    if message.selection.shared:
        return message
    most = min(replicas * k, max(4 * k, chunk // 4))
    selection = TopK(most, chunk) if most < chunk else Everything(chunk, chunk)
    return replace(message, selection=selection, precision=PRECISIONS["2bit"])
