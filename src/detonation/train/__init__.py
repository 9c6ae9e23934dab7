"""Training runs from recipes: a folder of recipe, output, loop, run, verbs imports from those
before it alone."""
