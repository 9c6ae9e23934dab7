"""Parts of which the Triton kernels are made: functions that run inside a kernel, and no launch of their own."""
