"""Optional parts of a step: balance between slow and fast replicas, closeness of replicas that
round differently, and single rounding.
"""
