"""Finished runs for people: `read` parses a run directory, `terminal` prints, `figures` draws, `page` writes the page.

`words` formats numbers and texts. No module here imports torch or another package of detonation.
"""
