"""Processes of a run and the network between them: launch, rendezvous, mesh, heartbeat and
shutdown.
"""
