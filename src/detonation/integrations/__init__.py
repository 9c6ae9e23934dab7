"""Integrations with training libraries, one file each: sharding, steps, saving and logging with
replicas.

Each file needs its library's extra. They may import anything of the package, but no package module
imports them.
"""
