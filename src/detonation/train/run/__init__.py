"""One run: the request, its checks, the processes, and each rank's work from joining to the summary.

Imports from `recipe`, `output` and `loop`; `verbs` and `cli` may import from here.
"""
