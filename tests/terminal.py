"""What a terminal shows of the bytes that were written to it: as much of one as the live display uses."""

import re

_TOKEN = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])", re.DOTALL)


class Terminal:
    """Lines of text and a cursor. Raises on a sequence that it does not know."""

    def __init__(self):
        self._lines, self._row, self._column = [[]], 0, 0

    def feed(self, text):
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            assert token, f"unknown sequence {text[at : at + 10]!r}"
            at = token.end()
            number, command, control, character = token.groups()
            if character:
                self._put(character)
            elif control:
                self._column = 0
                self._row += control == "\n"  # a terminal turns it into both
            else:
                self._move(command, number)
            self._lines += [[] for _ in range(self._row + 1 - len(self._lines))]

    def _move(self, command, number):
        if command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif command == "J":
            self._lines[self._row] = self._lines[self._row][: self._column]
            del self._lines[self._row + 1 :]
        elif command == "K":
            assert number == "2", number  # the whole line
            self._lines[self._row] = []
        else:
            assert command == "m", command  # colours

    def _put(self, character):
        line = self._lines[self._row]
        line += " " * (self._column + 1 - len(line))
        line[self._column] = character
        self._column += 1

    @property
    def lines(self):
        """What can be read, from the top to the last line with something in it."""
        return "\n".join("".join(line).rstrip() for line in self._lines).rstrip("\n").split("\n")
