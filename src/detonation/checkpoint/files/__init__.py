"""The files of a checkpoint, by key: shards, manifest, their directory.

Nothing here knows a model or an optimizer.
"""
