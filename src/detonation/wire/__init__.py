"""Sharding over a slow link: quantized all-gather of weights, reduce-scatter of gradients with
error feedback.
"""
