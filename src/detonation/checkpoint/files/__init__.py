"""Files of a checkpoint: shard files, which hold tensors and values by key, the manifest, and the
directory of all these files.

Nothing in this folder depends on a model or an optimizer.
"""
