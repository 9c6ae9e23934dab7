"""Integrations with training libraries, one file each: sharding, steps, saving and logging with
replicas.

Each file needs its library's extra. The files may import any module of the package, but no other
module imports them.
"""
