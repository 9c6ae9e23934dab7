"""Checkpoints: the state of a run on disk, whole or absent, checked on reading, for the same world or another.

`files` is the format; `async_save` holds the calls that save, `newest` the call that loads, and `elastic` the algebra
for another number of replicas or shards. Saving and loading do not know each other.
"""
