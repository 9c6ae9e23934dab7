"""Integrity of one message: its header, its validation, and the counts of skipped and refused
messages.

The guard decides in tensor arithmetic on the message's device; the host only explains the decision.
"""
