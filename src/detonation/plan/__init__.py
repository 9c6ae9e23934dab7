"""The planner: predicts the cost of each scheme on a network, and chooses a scheme.

`cost` predicts costs, `losses` contains measured losses, `search` ranks schemes and explains the
ranking, and `auto` chooses a scheme in a running job.
"""
