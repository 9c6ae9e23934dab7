"""Scheme "auto" of a recipe: chooses the scheme of a run from the measured link."""
