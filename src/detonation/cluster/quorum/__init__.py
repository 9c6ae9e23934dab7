"""Several rendezvous stores that clients use together as one store. A minority of the stores may be
lost.

`register` has the protocol by which a client changes or reads one key. The protocol uses no clock
and no network. `connection` connects this process to one of the stores, and `stores` sends requests
to all of them. `store` makes a `torch.distributed.Store` from all stores.
"""
