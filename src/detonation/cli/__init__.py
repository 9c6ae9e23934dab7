"""Command line: flags in `arguments`, functions of verbs in `verbs`, entry point in `command`.

Slow imports are delayed until a verb runs.
"""
