"""Optional gates of a step: balance, and closeness of replicas that round differently."""
