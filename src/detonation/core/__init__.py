"""The algorithms: the messages of a replica, their schedule, and how every replica turns the messages into the same update.

Read upwards: flat, compute, codec, memory, integrity, schemes, engine, link, replicator, agreement, optimizer. It needs
torch alone; everything above it may call it.
"""
