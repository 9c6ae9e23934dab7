"""Replicators connect a scheme to the training step: gradients before it, or parameters after it.

Only the channel passes a signal through memory, engine and exchange. Called by `core.agreement` and
`core.optimizer`.
"""
