"""Saving: a copy of this rank's state, its file, and the agreement of all ranks that the checkpoint is whole.

`async_save` holds the public calls, `Checkpoints` and `save_checkpoint`.
Users and `train` call them; it imports `checkpoint.files` and the files beside it, never `load`.
"""
