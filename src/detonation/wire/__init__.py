"""Sharding over a slow link: a quantized all-gather of weights, and a quantized reduce-scatter of
gradients with error feedback.
"""
