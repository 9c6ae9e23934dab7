"""Log of updates: the messages of each step as the replicas received them, and their replay.

A checkpoint and the log after it reproduce any later step, bit for bit.
"""
