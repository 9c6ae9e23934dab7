"""The scheme of a run with `name = "auto"`: requested in the recipe, chosen from the measured link,
and adapted when the link changes.
"""
