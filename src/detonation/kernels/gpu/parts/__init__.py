"""Parts of which the Triton kernels are made: functions that run inside a kernel, and no launch of their own.

`addressing` finds rows in tensors and messages, `choosing` the coefficients of a row, `numbers` their bits.
"""
