"""C++ kernels for the CPU: the functions of codec and memory that take most time, compiled with
g++ on first use.

Every kernel computes the same function, by the same rules, as a plain torch version in `core`.
Without g++ the plain torch version runs. This package imports nothing else of detonation, and only
`core.compute` calls it.
"""
