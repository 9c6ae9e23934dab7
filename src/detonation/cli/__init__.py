"""The command line: `arguments` holds the flags, `verbs` the functions of the verbs (subcommands),
and `command` the entry point.

Slow imports are delayed until a verb runs.
"""
