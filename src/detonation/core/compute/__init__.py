"""Arithmetic on tensors (bit packing, bitmaps, checksums, top-k, sums in a fixed order) in plain
torch, and in compiled kernels where these exist.

In core only `kernel_library` imports `detonation.kernels`. Every package of core may call the
functions of this package. None of these functions depends on the format of messages.
"""
