"""Schemes: frozen descriptions of messages and their schedule, their registry, and byte arithmetic.

Importing this package registers every scheme. A scheme knows no link.
"""

# ruff: noqa: I001  the order of registration is the order in lists
from detonation.core.schemes import gradients as gradients
from detonation.core.schemes import rotating as rotating
from detonation.core.schemes import parameters as parameters
from detonation.core.schemes import compressed as compressed
