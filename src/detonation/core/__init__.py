"""The algorithms: messages of a replica, their schedule, and how all replicas turn them into the
same update.

It needs torch alone; everything above it may call it. docs/design.md lists the rooms.
"""
