"""The log of agreed updates: each step's messages as the replicas received them, and the replay of a log.

A checkpoint and the log after it are any later step, bit for bit. `records` is the format, `writer` records in the
run, `repeat` plays back and takes the steps. It imports from `core` alone; `train` may call it.
"""
