"""Integrity of one message: its header, its validation, and the counts of skipped and refused
messages.

The guard decides whether a message is used. Tensor operations on the device of the message make
this decision; the host only describes the reason.
"""
