"""`[scheme] name = "auto"`: the scheme is chosen for the link that is there, and may follow it during the run.

Imports from `recipe`, `output` and `loop`; `run` and `verbs` may import from here.
"""
