"""The scheme of a run: requested as "auto", chosen from the measured link, and adapted to the
link.
"""
