"""Communicators that emulate a network (throttled, simulated, loopback), and measurements."""
