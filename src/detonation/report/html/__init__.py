"""The HTML page about one or several runs: self-contained, without scripts.

`page` writes it, `sections` formats its parts, `grids` its tables; page.css is the style sheet. It imports `report` and
`report.figures`; only `cli` calls it.
"""
