"""Triton kernels for accelerators: encode, decode and inspect whole messages, each in one launch
over all rows.

Written for CUDA and held to the reference engine by Triton's interpreter; no run on a GPU yet.
Offsets are int64, no two writes meet, and sums have a fixed order, but for those of whole numbers
(`int8`).
"""
