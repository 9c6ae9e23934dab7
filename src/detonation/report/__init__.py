"""Reports of finished runs: the parsed run directory, tables for a terminal, and number formats.

`figures` draws, and `html` writes the page. No module here imports torch or another package of detonation; `train` and
`cli` may call it.
"""
