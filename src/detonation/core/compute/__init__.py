"""Compute: arithmetic on flat memory (packing, bitmaps, checksums, top-k, sign steps) that compiled
kernels speed up.

`kernel_library` is the only importer of `detonation.kernels`. Every room above may call it; it
knows no message.
"""
