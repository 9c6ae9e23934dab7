"""The command line: flags (arguments), a function per verb and how errors are shown (verbs), and the command itself.

Imports from every folder; only `__main__` may import from here. Nothing heavy is imported before a verb runs.
"""
