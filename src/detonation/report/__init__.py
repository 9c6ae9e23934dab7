"""Reports about runs: `read` parses a run directory, `terminal` prints, `figures` draws, `page`
writes HTML, and `words` formats numbers and texts.

None of them imports torch.
"""
