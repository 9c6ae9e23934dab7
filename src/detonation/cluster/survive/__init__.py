"""Replicas that continue after the loss of other replicas, and let new replicas join.

`membership` notices the loss of a replica and makes all ranks agree on the remaining members;
`agreement` has the records of this agreement. `partition` detects stores and replicas that do not
answer, and `port` shows other ranks that a process is alive. `surviving` repeats collectives that a
loss has interrupted. `groups` makes and ends process groups. `elastic_axis` has the store of a
launcher, and the function `elastic`, which creates an axis. `users` has the optimizers on an axis,
and `turns` counts their steps. Users of the library and the trainer call `elastic`. Core only uses
the communicator that `elastic` returns.
"""
