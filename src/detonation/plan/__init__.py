"""The planner: predicted cost of each scheme on a given network, and the choice of one.

`cost` predicts, `losses` holds measured losses, `search` ranks and explains, `auto` chooses in a
running job.
"""
