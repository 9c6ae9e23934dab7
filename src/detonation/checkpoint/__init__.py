"""Checkpoints: the state of a run on disk, whole or absent, checked on reading, for the same world or another.

`files` is the format, `save` writes and `load` reads with it; the two do not know each other.
Imports go `files <- gather, rank_state, volumes, verify <- save, load`; users, `train` and `cli` call it.
"""
