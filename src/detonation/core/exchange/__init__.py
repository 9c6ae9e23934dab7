"""Exchange: the collectives through which all replicas receive the same messages, and what goes
through them.

An exchange encodes and seals the message of a step, sends it over a link, and opens the messages
that arrive. Called by the channel; a bucket of gradients is a piece of a message, so that one
header and one decision are enough for a step.
"""

from detonation.core.exchange.chosen import exchange_for, room_of
from detonation.core.exchange.exchange import Exchange
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.exchange.unused import Unused
