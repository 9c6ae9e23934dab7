"""The processes of a run and the network between them: start, meet, lay out on a mesh, watch each other, end.

`processes` and `network` hold the parts; the files here are the entry points that training, commands and users call.
Imports go `processes <- network` and `processes <- ` the files of this folder; all may import `core`, nothing above it.
"""
