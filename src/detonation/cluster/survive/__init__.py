"""Replicas that survive the loss of another: who is left, and collectives that go on without the lost one.

`membership` notices a loss and agrees on who is left; `surviving` repeats what was interrupted among them; `groups`
makes and ends process groups. Called by users and by the trainer as `elastic`; used by core as a `Communicator`.
"""
