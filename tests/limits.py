"""The limit of tests that wait for something."""

LIMIT_S = 600
"""Whatever has not come by now hangs: a slow and busy machine takes a tenth of it.

It is shorter than pytest's own (pyproject.toml), which tells nothing of other processes.
"""
