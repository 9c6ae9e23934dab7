"""Replicas that survive the loss of others, and let new ones join.

`membership` notices a loss and agrees on the remaining members, with the records of `agreement`.
`surviving` repeats interrupted collectives among them. `groups` makes and ends process groups.
`elastic_axis` holds a launcher's store, and `users` the optimizers on the axis. Users and the
trainer call `elastic`; core only uses the resulting communicator.
"""
