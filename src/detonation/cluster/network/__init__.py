"""Networks to run on, real or not: throttled, simulated and loopback communicators, measurements."""
