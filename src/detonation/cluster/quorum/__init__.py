"""One store that is kept by several, of which a minority may be lost.

`register` says what a client asks of each store to change or read a key, without clock and network.
`connection` reaches one store. `store` is the `torch.distributed.Store` made of them.
"""
