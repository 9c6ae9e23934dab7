"""Planner: predicts the cost of each scheme on a network, and chooses one.

`cost` predicts, `losses` contains measured losses, `search` ranks and explains, `auto` chooses in a
running job.
"""
