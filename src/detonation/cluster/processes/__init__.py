"""Start and end of a process: rendezvous, heartbeat, signals, results, failures and exit."""
