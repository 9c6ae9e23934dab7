"""Agreement of all ranks: whether to stop, whether replicas are equal, and whether they decode
alike.

Its calls are collective. Only `core.optimizer` calls it, except for `Safety`, which users create.
"""
