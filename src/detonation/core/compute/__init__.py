"""Compute: arithmetic on flat memory (packing, bitmaps, checksums, top-k, sign steps) with compiled
fast paths.

Only `kernel_library` imports `detonation.kernels`. Every package of core may call these functions,
which know nothing of messages.
"""
