"""Checkpoints: the state of a run on disk, whole or absent, checked on reading, for the same world
or another."""
