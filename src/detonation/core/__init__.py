"""The algorithms of training: what replicas send, at which steps, and how all replicas decode the
same messages to the same update.

Core depends on torch alone, and every other package may import it. docs/design.md lists the
packages of core.
"""
