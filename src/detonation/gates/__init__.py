"""Optional parts of a step: balance between slow and fast replicas, and closeness of replicas that
round differently.
"""
