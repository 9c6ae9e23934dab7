"""Links: communicators that carry bytes, the link that counts them, and the exchanges that messages
go through.

The only room of a step that knows the network. Called by replicators, agreement, the planner and
the trainer.
"""
