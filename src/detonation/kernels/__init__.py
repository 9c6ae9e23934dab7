"""C++ kernels for the CPU: the slowest functions of codec and memory, compiled with g++ on first
use.

Every kernel computes the same function as a plain torch version in `core`, and the same rules hold
for both versions. Without g++ the plain version runs. This package imports nothing else of
detonation, and only `core.compute` calls it.
"""
