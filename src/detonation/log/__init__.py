"""The update log: files with the messages of each step as replicas received them, and the replay of
these messages.

A checkpoint and the log that was written after it reproduce any later step, bit for bit.
"""
