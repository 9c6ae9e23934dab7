"""Networks to run on, real or not: throttled, simulated and loopback communicators, measurements.

Each communicator takes the place of a mesh axis in `replicate`; `measure` fills the `Profile` that the planner reads.
`plan`, `train` and benchmarks call it; it imports `cluster.processes` and `core`.
"""
