"""Schemes: frozen descriptions of messages and their schedule, their registry, and the arithmetic
of their bytes.

Importing the room registers every scheme of the package. Everything above may call it; it knows no
link.
"""

# ruff: noqa: I001  the order of registration is the order in lists
from detonation.core.schemes import gradients as gradients
from detonation.core.schemes import rotating as rotating
from detonation.core.schemes import parameters as parameters
from detonation.core.schemes import compressed as compressed
