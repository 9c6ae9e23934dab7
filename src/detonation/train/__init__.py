"""Training runs from recipes. Each of the folders recipe, output, loop, run and verbs imports only
from earlier folders in this list.
"""
