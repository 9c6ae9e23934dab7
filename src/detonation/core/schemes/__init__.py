"""Schemes: frozen descriptions of messages and their schedule, their registry, and byte arithmetic.

Importing this package registers every scheme. A scheme knows no link.
"""

from detonation.core.schemes import gradients as gradients
from detonation.core.schemes import parameters as parameters
