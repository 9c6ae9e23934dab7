"""Triton kernels for accelerators: encode, decode and inspect whole messages, one launch each over
all rows.

Tests compare the kernels in Triton's interpreter with the reference engine; they ran on one H200
(docs/gpu.md). Offsets are int64. No two programs write the same address. Sums have a fixed order,
except sums of whole numbers (`int8`).
"""
