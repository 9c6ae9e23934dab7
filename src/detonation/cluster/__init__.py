"""Processes of a run and the network between them: start, rendezvous, mesh, heartbeat and end."""
