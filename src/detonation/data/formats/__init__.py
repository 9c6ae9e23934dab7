"""Readers of formats: documents and rows in files, images in folders of classes, and data sets of the hub.

`documents`, `image_files` with `pictures`, and `hub` read; nothing here downloads packages. It imports `download`
alone; the loaders of `data` call it.
"""
