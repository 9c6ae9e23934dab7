"""Links: communicators send bytes, and a link counts them.

The only package in a step that knows the network. Called by replicators, agreement, the planner and
the trainer.
"""
