"""The training loop of one rank: its session, a step, validation, checkpoints, and the summary at
the end."""
