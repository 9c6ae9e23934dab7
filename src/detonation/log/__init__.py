"""Log of agreed updates: each step's messages as the replicas received them, and the replay of
a log.

A checkpoint and the log after it are any later step, bit for bit.
"""
