"""Throttled, simulated and loopback communicators, and measurements of networks."""
