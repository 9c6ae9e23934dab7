"""Exchange: the collectives through which all replicas receive the same messages.

An exchange encodes and seals the message of a step, sends it over a link, and opens the received
messages. The channel calls it. A bucket of gradients is a piece of a message, so a step needs only
one header and one decision.
"""

from detonation.core.exchange.chosen import exchange_for, room_of
from detonation.core.exchange.exchange import Exchange
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.exchange.unused import Unused
