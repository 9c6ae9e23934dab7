"""The parts of a process's life: rendezvous, heartbeat, signals, results, failures and exit.

The files here import each other and `torch` only; none of them starts a run.
`cluster` (launch, init), `train` and `cli` call them.
"""
