"""The update log: the messages of each step as replicas received them, and their replay.

A checkpoint and the log after it reproduce any later step, bit for bit.
"""
