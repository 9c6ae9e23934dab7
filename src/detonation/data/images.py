"""Labelled images, normalised by mean and standard deviation of the training images."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from detonation.data import readers
from detonation.data.dataset import Data
from detonation.data.packages import check_source, locate
from detonation.data.pictures import Decoded, Form, Pictures, Split, cifar10, fashion_mnist, from_folder, from_hub

NAMED = {"cifar10": cifar10, "fashion-mnist": fashion_mnist}


def images(
    source: str = "fashion-mnist",
    flip: bool = False,
    crop: int = 0,
    size: int | None = None,
    channels: int | None = None,
    split: str | None = None,
    validation_split: str | None = None,
    column: str | None = None,
    label_column: str | None = None,
) -> Data:
    """Loads labelled images; those of files are decoded when a batch needs them.

    Args:
        source: `fashion-mnist` (28x28, grey), `cifar10` (32x32, colour), a directory with `CLASS/*.png` (or .jpg; every
            tenth image of a class is held out) or with `train/CLASS` and `validation/CLASS`, a directory of
            `save_to_disk`, or `hf:NAME[:CONFIG]` of the hub.
        flip: Mirrors a training image left to right with probability 1/2.
        crop: Pads a training image by so many pixels of the mean and cuts a random window of the original size.
        size: Scale images to squares of so many pixels, and cut off what is longer. By default that of the model, where
            it has one; otherwise the images must be of one size.
        channels: 1 for grey, 3 for colour; by default colour where one image has it.
        split, validation_split, column, label_column: Only with `hf:` and `save_to_disk`; by default "train", "test",
            "image" or "img", and "label" or "labels".

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
        name, decoded = readers.label(source), from_hub(source, *columns, form)
    else:
        readers.refuse(source, split=split, validation_split=validation_split, column=column, label_column=label_column)
        name, decoded = _read(source, form)
    height, width, depth = decoded.train.images.shape[1:]
    if not 0 <= crop < min(height, width):
        raise ValueError(f"crop must be at least 0 and below the size {height}x{width}, not {crop}")
    mean, std = statistics(decoded.train)
    train = Images(decoded.train, mean, std, flip, crop)
    validation = Images(decoded.validation, mean, std, flip=False, crop=0)
    square = {"image_size": height} if height == width else {}
    return Data(name, source, "images", train, validation, {**square, "channels": depth, "classes": decoded.classes})


@final
@dataclass(frozen=True)
class Images:
    """Images as bytes, possibly mapped from disk; a batch is converted to normalised floats when it is drawn."""

    split: Split
    mean: Tensor  # [C], of bytes
    std: Tensor  # [C]
    flip: bool
    crop: int

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        chosen = indices.numpy()
        pixels = torch.from_numpy(self.split.images[chosen])  # uint8 [B, H, W, C], a copy
        values = ((pixels - self.mean) / self.std).permute(0, 3, 1, 2).contiguous()
        return {"pixel_values": values, "labels": torch.from_numpy(self.split.labels[chosen])}

    def augment(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Crops and mirrors each image at random.

        Shapes: `pixel_values` `[B, C, H, W]` -> the same.
        """
        values = batch["pixel_values"]
        if self.crop:
            values = _random_crop(values, self.crop, generator)
        if self.flip:
            chosen = torch.rand(len(values), generator=generator) < 0.5
            values = torch.where(chosen.view(-1, 1, 1, 1), values.flip(3), values)
        return {**batch, "pixel_values": values}


def _random_crop(values: Tensor, border: int, generator: torch.Generator) -> Tensor:  # [B, C, H, W]
    count, _, height, width = values.shape
    padded = pad(values, (border, border, border, border)).permute(0, 2, 3, 1)  # [B, H + 2b, W + 2b, C]
    shift = torch.randint(2 * border + 1, (2, count, 1), generator=generator)
    rows = shift[0] + torch.arange(height)  # [B, H]
    columns = shift[1] + torch.arange(width)  # [B, W]
    windows = padded[torch.arange(count).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
    return windows.permute(0, 3, 1, 2).contiguous()


def statistics(split: Split) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, in units of bytes: over all images, or 1000 that are decoded.

    Shapes: `[N, H, W, C]` uint8 -> `[C]` fp32, twice.
    """
    if isinstance(split.images, Pictures):  # to decode all of them would take minutes
        count = len(split.images)
        few = torch.arange(min(count, 1000)) * count // min(count, 1000)
        split = replace(split, images=split.images[few.numpy()])
    pixels = len(split.images) * split.images.shape[1] * split.images.shape[2]
    total = torch.zeros(split.images.shape[3], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for start in range(0, len(split.images), 1000):
        # In parts, because all images as int32 would not fit in memory; the sum of 1000 squared bytes is below 2**31.
        part = split.images[start : start + 1000].astype("int32")
        total += torch.from_numpy(part.sum(0, dtype="int32")).double().sum((0, 1))
        squares += torch.from_numpy((part * part).sum(0, dtype="int32")).double().sum((0, 1))
    mean = total / pixels
    # A constant channel becomes zero, not a division by zero.
    std = (squares / pixels - mean**2).clamp(min=0).sqrt()
    return mean.float(), torch.where(std > 0, std, 1.0).float()


def _read(source: str, form: Form) -> tuple[str, Decoded]:
    """Reads a local source: its label and its images."""
    if source in NAMED:
        found = NAMED[source](locate(source))
        return source, replace(found, train=found.train.fitted(form), validation=found.validation.fitted(form))
    path = check_source(source, NAMED)
    return path.name, from_folder(path, form)
