"""Schemes: frozen descriptions of messages and their schedule, a registry of them, and formulas for
their bytes.

Importing this package registers every scheme. A scheme knows nothing of links.
"""

# ruff: noqa: I001  the order of registration is the order in lists
from detonation.core.schemes import gradients as gradients
from detonation.core.schemes import rotating as rotating
from detonation.core.schemes import parameters as parameters
from detonation.core.schemes import compressed as compressed
