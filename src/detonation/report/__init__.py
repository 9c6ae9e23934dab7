"""Reports about runs. `read` parses a run directory, `terminal` prints tables, `figures` draws
charts, `page` writes HTML, and `words` formats numbers and texts.

None of these modules imports torch.
"""
