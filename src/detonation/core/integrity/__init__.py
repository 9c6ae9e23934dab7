"""Integrity of one message: its header, its validation, and the counts of skipped and refused
messages.

The guard decides by tensor arithmetic on the device of a message whether the message is used. The
host only explains the decision.
"""
