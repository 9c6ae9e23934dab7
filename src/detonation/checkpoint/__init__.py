"""Checkpoints: a run's state on disk, whole or absent, checked on reading, for this world or another one."""
