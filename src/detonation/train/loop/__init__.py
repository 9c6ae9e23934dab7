"""Training loop of one rank: session, steps, validation, checkpoints and the final summary."""
