"""The algorithms: messages of a replica, their schedule, and how all replicas turn them into the same update.

Read upwards: flat, compute, codec, memory, integrity, schemes, engine, link, replicator, agreement, optimizer. It needs
torch alone; everything above it may call it.
"""
