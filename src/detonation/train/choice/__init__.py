"""Scheme "auto" of a recipe: chooses the scheme of a run from the measured link, and adapts the
scheme when the link changes.
"""
