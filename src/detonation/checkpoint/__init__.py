"""Checkpoints: the state of a run on disk, written atomically, checked on reading, loaded into the
same world or another.
"""
