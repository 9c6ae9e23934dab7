"""Integrations with training libraries, one file for each library. They connect sharding, steps,
saving and logging of the library with replicas.

To use a file, install the extra of its library. The files may import any module of the package, but
no other module imports them.
"""
