"""Command line: flags in `arguments`, functions of verbs in `verbs`, entry point in `command`.

Heavy imports wait until a verb runs.
"""
