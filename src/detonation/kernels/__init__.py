"""C++ kernels for the CPU: the hot functions of codec and memory, compiled with g++ on first use.

Every kernel computes the same function as a plain torch version in `core`, under the same laws;
without g++ the plain version runs. This package imports nothing else of detonation, and only
`core.compute` calls it.
"""
