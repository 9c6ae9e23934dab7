"""Training runs from recipes, as `detonation train` and its sister commands do them.

Inside, a folder imports from those before it alone: recipe, output, loop, run, verbs.
Only `cli` imports from here; `train` imports from every other folder.
"""
