"""Gates of a step that attach where they are in use: balance, and closeness of replicas that round
differently."""
