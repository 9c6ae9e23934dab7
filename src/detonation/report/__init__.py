"""Finished runs for people: `read` parses a run directory, `terminal` prints, `figures` draws,
`page` writes the page.

`words` formats numbers and texts. Nothing here imports torch.
"""
