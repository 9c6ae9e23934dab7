"""The algorithms: a replica's messages, their schedule, and how all replicas decode them to the
same update.

It depends on torch alone; every other package may import it. docs/design.md lists its packages.
"""
