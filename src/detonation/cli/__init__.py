"""The command line: flags (flags, arguments), a function per verb (verbs), and how errors are shown (answers).

Imports from every folder; only `__main__` may import from here. Nothing heavy is imported before a verb runs.
"""
