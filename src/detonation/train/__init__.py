"""Training runs from recipes. The folders recipe, output, loop, run and verbs form layers in this
order: each folder imports only from folders before it.
"""
