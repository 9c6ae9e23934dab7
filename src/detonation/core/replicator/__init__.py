"""Replicators: where a scheme meets the training step, before it with gradients or after it with parameters.

The channel is the only caller on the way of a signal to an update. Called by agreement and optimizer.
"""
