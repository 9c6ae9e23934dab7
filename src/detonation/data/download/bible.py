"""Verse pairs from two Bibles in the format of the SWORD project: parallel text that is free and easy to get."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from detonation.data.download.extras import needs

_NOTE_BETWEEN_WORDS = re.compile(r"</note>(?=(?:<[qw][^>]*>)*[\w\u201c\u2018(])")
"""A footnote that replaces the space between two words, or before a quotation; the space must stay."""


def write_pairs(sword: Path, into: Path) -> int:
    """Writes `English<TAB>Spanish` lines of all verses that both modules under `sword` contain; returns their number.

    The two books number a few verses differently (NRSVA and KJV), so a few pairs are neighbours, not translations.
    """
    modules = needs("pysword.modules", "data").SwordModules(str(sword))
    configurations = modules.parse_modules()
    english, spanish = (_open(modules, configurations, language) for language in ("en", "es"))
    lines = [f"{first}\t{second}\n" for first, second in _pairs(english, spanish) if first and second]
    into.write_text("".join(lines), "utf-8")
    return len(lines)


def _open(modules: Any, configurations: dict[str, Any], language: str) -> Any:
    keys = [key for key, conf in configurations.items() if conf.get("lang") == language]
    if not keys:
        raise ValueError(
            f"no Bible in language {language} among the modules {', '.join(sorted(configurations)) or 'none'}"
        )
    bible = modules.get_bible_from_module(keys[0])
    # Without a cache each verse decompresses its whole book: minutes instead of seconds.
    bible._decompressed_text = lru_cache(maxsize=4)(bible._decompressed_text)
    return bible


def _pairs(english: Any, spanish: Any) -> Iterator[tuple[str, str]]:
    """Iterates over the verses that both books contain, in the order of the Spanish book."""
    shared = {book.name: book for books in english.get_structure().get_books().values() for book in books}
    for books in spanish.get_structure().get_books().values():
        for book in books:
            if book.name in shared:
                yield from _chapters(english, spanish, book, shared[book.name])


def _chapters(english: Any, spanish: Any, book: Any, same: Any) -> Iterator[tuple[str, str]]:
    for chapter, counts in enumerate(zip(book.chapter_lengths, same.chapter_lengths, strict=False), start=1):
        for verse in range(1, min(counts) + 1):
            yield _verse(english, book.name, chapter, verse), _verse(spanish, book.name, chapter, verse)


def _verse(bible: Any, book: str, chapter: int, verse: int) -> str:
    """One verse on one line, without tabs and markup; "" where the module leaves it out."""
    marked = bible.get(books=[book], chapters=[chapter], verses=[verse], clean=False)
    clean = needs("pysword.cleaner", "data").OSISCleaner().clean
    return " ".join(clean(_NOTE_BETWEEN_WORDS.sub("</note> ", marked)).split())
