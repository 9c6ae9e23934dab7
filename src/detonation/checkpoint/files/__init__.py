"""Files of a checkpoint: the shard files (tensors and values by key), the manifest, and the
directory of these files.

Nothing in this folder depends on a model or an optimizer.
"""
