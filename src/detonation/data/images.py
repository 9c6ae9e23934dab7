"""Labelled images from files, named data sets and the Hugging Face hub. Image files are decoded
when a batch needs them. Each channel is normalised.
"""

import gzip
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from detonation.choices import needs
from detonation.data import readers
from detonation.data.dataset import Data
from detonation.data.packages import check_source, locate

if TYPE_CHECKING:
    import numpy

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_log = logging.getLogger("detonation")
_AT_ONCE = 8
"""Threads decode a batch if it has at least this many pictures. The threads end before the process
can fork.
"""


def images(
    source: str = "fashion-mnist",
    flip: bool = False,
    size: int | None = None,
    channels: int | None = None,
    split: str | None = None,
    validation_split: str | None = None,
    column: str | None = None,
    label_column: str | None = None,
) -> Data:
    """Loads labelled images. Image files are decoded only when a batch needs them.

    Args:
        source: `fashion-mnist` (28x28, grey), a directory with `CLASS/*.png` (or .jpg, .webp;
            every tenth image of a class is held out) or with `train/CLASS` and `validation/CLASS`,
            a directory of `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        flip: Mirror a training image left to right with probability 1/2.
        size: Side in pixels of the squares to which images are scaled and cropped. By default the
            size that the model requires, if any; otherwise all images must have equal size.
        channels: 1 for grey, 3 for colour; by default colour if any image has colour.
        split, validation_split, column, label_column: Only with `hf:` and `save_to_disk`; by
            default "train", "test", "image" or "img", and "label" or "labels".

    Shapes: `pixel_values` `[B, C, H, W]` fp32, `labels` `[B]` int64.

    Raises:
        MissingData: The source was not fetched.
        ValueError: Images differ in size and no size is given, or an argument is out of range.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, not {size}")
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1 (grey) or 3 (colour), not {channels}")
    form = Form(size, channels)
    if readers.is_hub(source):
        columns = (split, validation_split, column, label_column)
        name = readers.label(source)
        decoded = from_hub(source, *columns, form)
    else:
        readers.refuse(source, split=split, validation_split=validation_split)
        readers.refuse(source, column=column, label_column=label_column)
        name, decoded = _read(source, form)
    height, width, depth = decoded.train.images.shape[1:]
    mean, std = statistics(decoded.train)
    train = Images(decoded.train, mean, std, flip)
    validation = Images(decoded.validation, mean, std, flip=False)
    sizes = {"channels": depth, "classes": len(decoded.classes)}
    if height == width:
        sizes = {"image_size": height, **sizes}
    exported = {"labels": decoded.classes, "preprocessor": preprocessor(train)}
    return Data(name, source, "images", train, validation, sizes, exported)


@final
@dataclass(frozen=True)
class Images:
    """Images whose pixels are bytes. Drawing a batch converts its pixels to normalised floats.

    Args:
        mean: [C], mean of the bytes of each channel.
        std: [C], standard deviation of the bytes of each channel.
    """

    split: "Split"
    mean: Tensor
    std: Tensor
    flip: bool

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        chosen = indices.numpy()
        pixels = torch.from_numpy(self.split.images[chosen])  # a copy, [B, H, W, C] uint8
        values = ((pixels - self.mean) / self.std).permute(0, 3, 1, 2).contiguous()
        return {"pixel_values": values, "labels": torch.from_numpy(self.split.labels[chosen])}

    def augment(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """If `flip` is True, mirrors each image left to right with probability 1/2.

        Shapes: `pixel_values` `[B, C, H, W]`, in input and output.
        """
        values = batch["pixel_values"]
        if self.flip:
            chosen = torch.rand(len(values), generator=generator) < 0.5
            values = torch.where(chosen.view(-1, 1, 1, 1), values.flip(3), values)
        return {**batch, "pixel_values": values}


def preprocessor(images: Images) -> dict[str, Any]:
    """Returns the configuration with which an image processor of transformers converts a picture to
    the `pixel_values` of this data set.
    """
    height, width, depth = images.split.images.shape[1:]
    scaled = height == width
    return {
        "image_processor_type": "CLIPImageProcessor",  # ViT's image processor cannot crop
        "do_convert_rgb": depth == 3,
        "do_resize": scaled,
        "size": {"shortest_edge": height},
        "resample": 3,  # bicubic
        "do_center_crop": scaled,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": (images.mean.double() / 255).tolist(),
        "image_std": (images.std.double() / 255).tolist(),
    }


def _over_pixels(images: Any) -> Tensor:
    """Returns the sum of each channel over all pixels of int32 `images`."""
    over_images = images.sum(0, dtype="int32")
    return torch.from_numpy(over_images).double().sum((0, 1))


def statistics(split: "Split") -> tuple[Tensor, Tensor]:
    """Returns the mean and standard deviation of each channel, whose values are from 0 to 255.

    Uses all images, or a sample of 1000 images if images are decoded when they are read.

    Shapes: `[N, H, W, C]` uint8 -> `[C]` fp32, twice.
    """
    images = split.images
    # use a sample, because decoding all pictures would take minutes
    if isinstance(images, Pictures):
        count = len(images)
        size = min(count, 1000)
        sample = torch.arange(size) * count // size
        images = images[sample.numpy()]
    pixels = len(images) * images.shape[1] * images.shape[2]
    total = torch.zeros(images.shape[3], dtype=torch.float64)
    squares = torch.zeros_like(total)
    # 1000 images at a time: the sum of 1000 squared bytes is below 2**31 and fits in int32
    for start in range(0, len(images), 1000):
        part = images[start : start + 1000].astype("int32")
        total += _over_pixels(part)
        squares += _over_pixels(part * part)
    mean = total / pixels
    std = (squares / pixels - mean**2).clamp(min=0).sqrt()
    # replace a deviation of 0 by 1, because images are divided by the deviation
    return mean.float(), torch.where(std > 0, std, 1.0).float()


def _read(source: str, form: "Form") -> tuple[str, "Decoded"]:
    if source in NAMED:
        found = NAMED[source](locate(source))
        train = found.train.fitted(form)
        validation = found.validation.fitted(form)
        return source, replace(found, train=train, validation=validation)
    path = check_source(source, NAMED)
    return path.name, from_folder(path, form)


@dataclass(frozen=True)
class Form:
    """The format that all images of a data set must have.

    Args:
        size: Side of the square to which images are scaled; None does not scale.
        channels: 1 (grey) or 3 (colour); None keeps the channels of the images.
        shape: Height and width of all images, if `size` is None.
    """

    size: int | None = None
    channels: int | None = None
    shape: tuple[int, int] = (0, 0)

    def whole(self) -> tuple[int, int, int]:
        """Returns the height, width and channels of each image."""
        height, width = self.shape
        if self.size:
            height = self.size
            width = self.size
        return height, width, self.channels or 3


@final
class Pictures:
    """An array of images that are decoded when they are read: `pictures[indices]` returns
    `[B, H, W, C]` uint8.

    Args:
        open_picture: Returns the pillow image with an index.
        count: Number of images.
        name: Returns the name of the image with an index, for errors.
    """

    def __init__(
        self, open_picture: Callable[[int], Any], count: int, form: Form, name: Callable[[int], str]
    ) -> None:
        self._open = open_picture
        self._form = form
        self._name = name
        self.shape = (count, *form.whole())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Any) -> "numpy.ndarray[Any, Any]":
        numbers = list(map(int, indices))
        if len(numbers) < _AT_ONCE:
            arrays = list(map(self._decoded, numbers))
        else:
            with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as threads:
                arrays = list(threads.map(self._decoded, numbers))
        stacked: numpy.ndarray[Any, Any] = needs("numpy", "data").stack(arrays)
        return stacked

    def _decoded(self, number: int) -> Any:
        np = needs("numpy", "data")
        ops = needs("PIL.ImageOps", "data")
        height, width, channels = self._form.whole()
        picture = self._open(number)
        # refuse images with more than 8 bits per channel, because pillow would clip their values
        if picture.mode.startswith(("F", "I")):
            raise ValueError(
                f"{self._name(number)} has pixels of more than 8 bits: save the image with 8 bits"
            )
        mode = "RGB"
        if channels == 1:
            mode = "L"
        picture = _on_white(picture).convert(mode)
        if self._form.size and picture.size != (width, height):
            bicubic = needs("PIL.Image", "data").Resampling.BICUBIC
            picture = ops.fit(picture, (width, height), bicubic)
        _require_size(self._name(number), (picture.height, picture.width), (height, width))
        return np.asarray(picture).reshape(height, width, channels)


@dataclass(frozen=True, repr=False)
class Split:
    """Images `[N, H, W, C]` uint8 and labels `[N]` int64."""

    images: "numpy.ndarray[Any, Any] | Pictures"
    labels: "numpy.ndarray[Any, Any]"

    def fitted(self, form: Form) -> "Split":
        array = self.images
        _, height, width, channels = array.shape
        if form.size in (None, height, width) and form.channels in (None, channels):
            return self
        image = needs("PIL.Image", "data")

        def opened(number: int) -> Any:
            pixels = array[number]
            if channels == 1:
                pixels = pixels[:, :, 0]
            return image.fromarray(pixels)

        form = replace(form, channels=form.channels or channels, shape=(height, width))
        return replace(self, images=Pictures(opened, len(array), form, lambda i: f"image {i}"))


@dataclass(frozen=True)
class Decoded:
    """The training and validation splits, with images of equal shape, and the names of the
    classes.
    """

    train: Split
    validation: Split
    classes: Sequence[str]

    def __post_init__(self) -> None:
        train = self.train.images.shape[1:]
        validation = self.validation.images.shape[1:]
        if train != validation:
            raise ValueError(
                f"training images have shape {train}, but validation images have shape {validation}"
                " (height, width, channels): give all images the same shape"
            )


def fashion_mnist(directory: Path) -> Decoded:
    """Reads Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017, arXiv 1708.07747) in the idx format."""
    np = needs("numpy", "data")

    def idx(name: str, header: int) -> Any:
        """Returns the bytes of a file after its header, as one flat array."""
        content = gzip.decompress((directory / name).read_bytes())
        return np.frombuffer(content, dtype="uint8", offset=header)

    def split(part: str) -> Split:
        images = idx(f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1)
        return Split(images, idx(f"{part}-labels-idx1-ubyte.gz", 8).astype("int64"))

    return Decoded(split("train"), split("t10k"), FASHION)


def from_folder(path: Path, form: Form) -> Decoded:
    """Reads the images in `train/CLASS/` and `validation/CLASS/`, or in `CLASS/`.

    If there is no `validation`, every tenth image of a class is held out. Classes are numbered in
    the order of their names.
    """
    parts: tuple[list[Path], list[Path]] = ([], [])
    if not (path / "train").is_dir():
        seen = Counter[Path]()
        for file in _files(path):
            parts[seen[file.parent] % 10 == 9].append(file)
            seen[file.parent] += 1
        if not all(parts):
            raise ValueError(
                f"{path} has no folder CLASS with at least ten images: add images to CLASS/*.png,"
                " or make the folders train/CLASS and validation/CLASS"
            )
    elif (path / "validation").is_dir():
        parts = (_files(path / "train"), _files(path / "validation"))
    else:
        raise ValueError(
            f"{path} has a folder train, but no folder validation: add validation/CLASS, or move"
            " the folders of classes out of train"
        )
    classes = sorted({file.parent.name for file in parts[0]})
    other = sorted({file.parent.name for file in parts[1]} - {*classes})
    if other:
        raise ValueError(
            f"{path / 'validation'} has classes that are missing in train: {', '.join(other)}; add"
            " them to train, or remove them"
        )
    if len(classes) == 1:
        raise ValueError(
            f"{path} has images of one class only, {classes[0]}: put the images of each class into"
            " a folder of their own"
        )
    if lacking := sorted({*classes} - {file.parent.name for file in parts[1]}):
        _log.warning(
            "%s: no image of class %s is held out, because the class has fewer than ten images, or"
            " no image in validation",
            path,
            readers.first_of(lacking),
        )
    form = _agreed([*parts[0], *parts[1]], form)

    def split(files: Sequence[Path]) -> Split:
        def opened(number: int) -> Any:
            return _readable(files[number], form)

        images = Pictures(opened, len(files), form, lambda number: str(files[number]))
        return Split(images, _labels(classes.index(file.parent.name) for file in files))

    return Decoded(split(parts[0]), split(parts[1]), classes)


def _files(path: Path) -> list[Path]:
    """Returns the images in `path`/CLASS, sorted by class and name.

    Raises `ValueError` if `path` holds no image, or if it holds anything else that is visible.
    """
    folders = _visible(path)
    files = [file for folder in folders for file in _visible(folder)]
    misplaced = [each for each in folders if not each.is_dir()]
    misplaced += [each for each in files if each.is_dir()]
    if misplaced:
        raise ValueError(
            f"{readers.first_of(misplaced)} is out of place: {path} must hold one folder for each"
            " class, and these folders must hold only images"
        )
    readers.require_suffix(files, SUFFIXES, "an image")
    if not files:
        raise ValueError(
            f"{path} holds no images in folders of classes: put images"
            f" ({', '.join(sorted(SUFFIXES))}) into one folder for each class"
        )
    return files


def _visible(folder: Path) -> list[Path]:
    """Returns the visible entries of `folder`, sorted by name; [] if `folder` is a file."""
    if not folder.is_dir():
        return []
    return readers.visible(folder)


def from_hub(
    source: str,
    split: str | None,
    validation_split: str | None,
    column: str | None,
    label_column: str | None,
    form: Form,
) -> Decoded:
    """Loads images from the hub. See `images` for the arguments."""

    names: list[str] = []

    def loaded(part: str) -> Split:
        found = readers.hub_rows(source, part)
        column_of_labels = readers.column_name(found, label_column, ["label", "labels"])
        names[:] = names or readers.class_names(found, column_of_labels)
        labels = _labels(map(int, found[column_of_labels]))
        pictures = readers.column_of(found, column, ["image", "img"])
        if not len(labels):
            raise ValueError(f"split {part} of {source} holds no images: name another split")
        first = pictures[0]
        channels = form.channels or _channels(first)
        own = replace(form, channels=channels, shape=(first.height, first.width))

        def name(number: int) -> str:
            return f"image {number} of {part}"

        return Split(Pictures(pictures.__getitem__, len(labels), own, name), labels)

    train = loaded(split or "train")
    validation = loaded(validation_split or "test")
    count = int(max(train.labels.max(), validation.labels.max())) + 1
    numbers = map(str, range(len(names), count))
    return Decoded(train, validation, [*names, *numbers][:count])


def _labels(numbers: Any) -> Any:
    return needs("numpy", "data").fromiter(numbers, dtype="int64")


def _on_white(picture: Any) -> Any:
    """Puts a picture with transparent pixels on a white background, as image processors of
    transformers do.
    """
    if not picture.has_transparency_data:
        return picture
    image = needs("PIL.Image", "data")
    white = image.new("RGBA", picture.size, "white")
    return image.alpha_composite(white, picture.convert("RGBA"))


def _require_size(name: str, own: tuple[int, int], shape: tuple[int, int]) -> None:
    """Raises `ValueError` if the shape of a picture differs from the shape of the first picture."""
    if own != shape:
        raise ValueError(
            f"{name} is {own[1]}x{own[0]}, but the first image is {shape[1]}x{shape[0]}: "
            "set data.size to scale all images to one size"
        )


def _readable(file: Path, form: Form, whole: bool = True) -> Any:
    """Opens an image file. Rotates or mirrors the image according to its EXIF orientation, as the
    library `datasets` does. Raises `ValueError` if pillow cannot read the file.

    Args:
        whole: If False, reads only the header, and does not rotate or mirror the image.
    """
    image = needs("PIL.Image", "data")
    try:
        with image.open(file) as picture:
            if not whole:
                return picture
            if form.size:  # lets pillow decode a JPEG at a lower resolution, which is faster
                picture.draft(None, (2 * form.size, 2 * form.size))
            return needs("PIL.ImageOps", "data").exif_transpose(picture)
    # pillow raises SyntaxError for a damaged PNG
    except (OSError, SyntaxError, image.DecompressionBombError) as error:
        raise ValueError(
            f"{file} is no image that pillow can read: {error}; replace or remove it"
        ) from error


def _agreed(files: Sequence[Path], form: Form) -> Form:
    """Reads the headers of `files`, and returns the format that all images must have. Unless `form`
    gives the number of channels, the format has colour if any image has colour.

    Raises `ValueError` if a file is no image, or if `form` has no size and images differ in size.
    """
    colours = set()
    shape = (0, 0)
    for file in files:
        picture = _readable(file, form, whole=False)
        colours.add(_channels(picture))
        upright = _upright_shape(picture)
        if shape == (0, 0):
            shape = upright
        if form.size is None:
            _require_size(str(file), upright, shape)
    return replace(form, channels=form.channels or max(colours), shape=shape)


def _upright_shape(picture: Any) -> tuple[int, int]:
    """Returns the height and width that a picture has after its EXIF orientation is applied.

    Does not decode the picture.
    """
    image = needs("PIL.Image", "data")
    # `getexif` of a PNG would decode the picture, because EXIF data may follow the pixels
    orientation = image.Image.getexif(picture).get(image.ExifTags.Base.Orientation, 1)
    if orientation >= _ON_ITS_SIDE:
        return picture.width, picture.height
    return picture.height, picture.width


_ON_ITS_SIDE = 5
"""The EXIF orientations from 5 to 8 exchange height and width."""


def _channels(picture: Any) -> int:
    if picture.mode in ("1", "L", "LA"):
        return 1
    return 3


NAMED = {"fashion-mnist": fashion_mnist}
