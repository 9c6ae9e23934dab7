"""An extension of griffe: doctests in docstrings are blocks of code, wherever they stand."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?! *$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around each doctest, which Markdown would take for quotations and links."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
