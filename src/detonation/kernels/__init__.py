"""C++ kernels for the CPU: the functions of codec and memory that take most time, compiled with
g++ on first use.

Every kernel computes the same function as a plain torch version in `core`, and the same rules hold
for both versions. Without g++ the plain version runs. This package imports nothing else of
detonation, and only `core.compute` calls it.
"""
