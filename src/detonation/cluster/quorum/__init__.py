"""One store made of several stores; a minority of them may be lost.

`register` has the protocol by which a client changes or reads a key; it uses no clock and no
network. `connection` connects to one store, and `stores` sends requests to all of them. `store`
makes a `torch.distributed.Store` of them.
"""
