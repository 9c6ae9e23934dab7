"""Triton kernels for accelerators: encode, decode and inspect whole messages, each in one launch
over all rows.

Triton's interpreter holds the kernels to the reference engine; they ran on one H200 (docs/gpu.md).
Offsets are int64. No two programs write the same address. Sums have a fixed order; only sums of
whole numbers (`int8`) do not.
"""
