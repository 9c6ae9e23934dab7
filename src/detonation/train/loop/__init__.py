"""The training loop of one rank: its session, steps, validation, checkpoints and final summary."""
