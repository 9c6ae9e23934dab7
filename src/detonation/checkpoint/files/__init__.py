"""The files of a checkpoint: shards, manifest, their directory, and every operation on the file system.

Nothing here knows a model or an optimizer: tensors come in and go out by key. `checkpoint` and `train` call it.
"""
