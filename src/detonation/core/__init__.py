"""The algorithms: a replica's messages, their schedule, and how all replicas decode them to the
same update.

Core depends on torch alone, and every other package may import it. docs/design.md lists the
packages of core.
"""
