"""Replicas that survive the loss of another, and let one in: who is left, and collectives that go
on without the lost.

`membership` notices a loss and agrees on who is left, in the words of `agreement`; `surviving`
repeats what was interrupted among them; `groups` makes and ends process groups; `elastic_axis` has
the store of a launcher; `users` hold the texts that go through it. Called by users and by the
trainer as `elastic`; core uses a `Communicator`.
"""
