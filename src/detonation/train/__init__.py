"""Training runs from recipes. The folders recipe, output, loop, run and verbs each import only from
earlier ones in this list.
"""
