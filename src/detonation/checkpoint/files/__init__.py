"""Files of a checkpoint, by key: shards, manifest, and their directory.

Nothing in this folder depends on a model or an optimizer.
"""
