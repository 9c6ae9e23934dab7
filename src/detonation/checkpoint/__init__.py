"""Checkpoints: the state of a run on disk. A checkpoint is written atomically, and checked on
reading. A run with the same or another number of replicas and shards can load it.
"""
