"""Integrity of one message: its header, its validation, and the counts of what was left out or refused.

The guard decides in tensor arithmetic where the message lies; the host only explains. Called by schemes and link.
"""
