"""Replicators: where a scheme meets the training step, before it with gradients or after it with
parameters.

The channel alone takes a signal through memory, engine and exchange. Called by agreement and
optimizer.
"""
