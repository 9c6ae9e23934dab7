"""Triton kernels for accelerators. A kernel encodes, decodes or inspects whole messages in one
launch over all rows.

Tests compare the kernels in Triton's interpreter with the reference engine. The kernels ran on one
H200 (docs/gpu.md). Offsets are int64. No two programs write the same address. Sums have a fixed
order, except sums of whole numbers (`int8`).
"""
