"""Pictures of any size: decoded when a batch asks for them, and brought into one form."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from detonation.data.download.extras import needs

if TYPE_CHECKING:
    import numpy

_AT_ONCE = 8
"""Pictures from which on threads decode; they are gone before anything forks."""


@dataclass(frozen=True)
class Form:
    """The form of all images of a data set.

    Args:
        size: Side of the square that images are scaled to; None leaves them as they are.
        channels: 1 (grey) or 3 (colour); None for those of the images.
        shape: Height and width, of images that all have them already.
    """

    size: int | None = None
    channels: int | None = None
    shape: tuple[int, int] = (0, 0)

    @property
    def whole(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width = (self.size, self.size) if self.size else self.shape
        return height, width, self.channels or 3

    def like(self, picture: Any) -> "Form":
        """This form, and where it leaves something open that of `picture`."""
        return replace(self, channels=self.channels or _channels(picture), shape=(picture.height, picture.width))

    def is_that_of(self, images: Any) -> bool:
        """True where `images` `[N, H, W, C]` have it."""
        _, *there = images.shape
        return self.size in (None, there[0], there[1]) and self.channels in (None, there[2])


@final
class Pictures:
    """Images as an array that is not in memory: `pictures[indices]` is `[B, H, W, C]` uint8.

    Args:
        open_picture: Returns the picture of a number, as pillow has it.
        name: Names it in errors.
    """

    def __init__(self, open_picture: Callable[[int], Any], count: int, form: Form, name: Callable[[int], str]) -> None:
        self._open, self._form, self._name = open_picture, form, name
        self.shape = (count, *form.whole)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Any) -> "numpy.ndarray[Any, Any]":
        numbers = [int(i) for i in indices]
        if len(numbers) < _AT_ONCE:
            arrays = [self._decoded(i) for i in numbers]
        else:
            with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as threads:
                arrays = list(threads.map(self._decoded, numbers))
        stacked: numpy.ndarray[Any, Any] = needs("numpy", "data").stack(arrays)
        return stacked

    def _decoded(self, number: int) -> Any:
        np, ops = needs("numpy", "data"), needs("PIL.ImageOps", "data")
        height, width, channels = self._form.whole
        picture = _of_8_bits(self._open(number), self._name(number)).convert("L" if channels == 1 else "RGB")
        if self._form.size and picture.size != (width, height):
            picture = ops.fit(picture, (width, height), needs("PIL.Image", "data").Resampling.BICUBIC)
        if picture.size != (width, height):
            raise ValueError(different(self._name(number), picture, (height, width)))
        return np.asarray(picture).reshape(height, width, channels)


def different(name: str, picture: Any, shape: tuple[int, int]) -> str:
    """The error for a picture of another size than the first one."""
    return (
        f"{name} is {picture.width}x{picture.height}, the first image {shape[1]}x{shape[0]}: "
        "set data.size to scale all of them to one size"
    )


def readable(file: Path, form: Form) -> Any:
    """The picture in a file, whole; raises `ValueError` where pillow cannot read it."""
    try:
        with needs("PIL.Image", "data").open(file) as picture:
            if form.size:
                picture.draft(None, (2 * form.size, 2 * form.size))  # JPEG decodes to less than all, where less will do
            picture.load()
            return picture.copy()
    except OSError as error:
        raise ValueError(f"{file} is no image that pillow can read: {error}") from error


def agreed(files: Sequence[Path], form: Form) -> Form:
    """The form of all `files`, of which no more than the head is read: colour where one of them has it.

    Raises `ValueError` for a file that is no image and, where the form has no size, for one of another size.
    """
    image, colours, shape = needs("PIL.Image", "data"), set(), (0, 0)
    for file in files:
        try:
            with image.open(file) as picture:
                colours.add(_channels(picture))
                shape = shape if shape != (0, 0) else (picture.height, picture.width)
                if form.size is None and (picture.height, picture.width) != shape:
                    raise ValueError(different(str(file), picture, shape))
        except OSError as error:
            raise ValueError(f"{file} is no image that pillow can read: {error}") from error
    return replace(form, channels=form.channels or max(colours), shape=shape)


def fitted(images: Any, form: Form) -> Pictures:
    """An array `[N, H, W, C]` uint8 as pictures of another form."""
    image, channels = needs("PIL.Image", "data"), images.shape[3]
    form = replace(form, channels=form.channels or channels, shape=images.shape[1:3])

    def opened(number: int) -> Any:
        array = images[number]
        return image.fromarray(array[:, :, 0] if channels == 1 else array)

    return Pictures(opened, len(images), form, lambda i: f"image {i}")


def _channels(picture: Any) -> int:
    return 1 if picture.mode in ("1", "L", "LA") or picture.mode.startswith("I") else 3


def _of_8_bits(picture: Any, name: str) -> Any:
    """The picture with the upper 8 bits of 16, because pillow clips where it converts those."""
    if picture.mode == "F":
        raise ValueError(f"{name} has real numbers for pixels: save it with 8 or 16 bits")
    if not picture.mode.startswith("I"):
        return picture
    np = needs("numpy", "data")
    return needs("PIL.Image", "data").fromarray((np.asarray(picture) >> 8).astype(np.uint8))
