"""Parts of a process's life: rendezvous, heartbeat, signals, results, failures and exit."""
