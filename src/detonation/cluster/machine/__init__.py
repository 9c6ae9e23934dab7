"""The position of a rank, and what its machine gives it: a device and a network interface.

The files here import each other and `torch` only. They read the environment and the machine, and change neither.
`cluster.processes` and `cluster.init` call them.
"""
