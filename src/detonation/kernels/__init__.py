"""C++ kernels for the CPU: the hot functions of codec and memory, compiled with g++ on first use.

Every kernel computes the function of a plain torch version in `core`, under the same laws; without
g++ the plain version runs. It imports nothing else of the package, and only `core.compute` may call
it.
"""
