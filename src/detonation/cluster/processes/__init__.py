"""Processes from start to exit: rendezvous, heartbeat, signals, results and failures."""
