"""Training runs that recipes describe. The folders recipe, output, loop, choice, run and verbs are
layers: each folder imports only from earlier folders of this list.
"""
