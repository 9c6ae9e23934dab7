"""Exchange: the collectives through which all replicas receive the same messages.

An exchange adds a header and a checksum to the message of a step, sends the message over a link,
and validates the received messages. The channel calls the exchange. Buckets are only pieces of the
message of a step, so each step needs only one header, and only one decision whether to use the
message.
"""

from detonation.core.exchange.chosen import exchange_for, room_of
from detonation.core.exchange.exchange import Exchange, empty_octets
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.exchange.unused import Unused
