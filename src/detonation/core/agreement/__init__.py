"""Agreement of the world: whether to stop, whether replicas are equal, and whether they decode alike.

Its calls are collective. Called by optimizer alone, but for `Safety`, which users make.
"""
