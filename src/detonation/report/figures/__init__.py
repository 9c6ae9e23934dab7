"""The figures of a report: matplotlib charts of loss, step time and bytes.

`colours` and `drawing` hold the style, `charts` the figures; matplotlib is imported when one is drawn. It imports
`report.read` and `report.words`; only `report.html` and the benchmarks call it.
"""
