"""The command line: flags (arguments), a function per verb and how errors are shown (verbs), and
the command itself.

Nothing heavy is imported before a verb runs.
"""
