"""Integrations with training libraries, one file for each library. A file connects the sharding,
steps, saving and logging of its library with replicas.

To use a file, install the extra of its library. The files may import any module of the package, but
no other module imports these files.
"""
