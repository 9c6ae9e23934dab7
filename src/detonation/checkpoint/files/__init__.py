"""Files of a checkpoint, by key: shards, manifest, and their directory.

Nothing here depends on a model or an optimizer.
"""
