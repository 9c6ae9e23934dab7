"""Loading: the newest checkpoint that is whole, put into a model and its optimizer, in the same world or another.

`newest` holds the public call, `load_checkpoint`; `elastic` is the algebra for another number of replicas or shards.
Users and `train` call it; it imports `checkpoint.files` and the files beside it, never `save`.
"""
