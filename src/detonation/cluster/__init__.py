"""Processes of a run and the network between them: start, meet, lay out on a mesh, watch each
other, end."""
