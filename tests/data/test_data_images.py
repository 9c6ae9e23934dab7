"""Images: the two named sets as published, class folders, and augmentation."""

import numpy as np
import pytest
import torch
from PIL import Image

from detonation.data import batch, load_dataset
from detonation.data.images import SUFFIXES, Images, Split, statistics


def picture(path, color, size=(6, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)


@pytest.fixture
def folder(tmp_path):
    for part in ("train", "validation"):
        for number, name in enumerate(["cat", "dog"]):
            for i in range(3):
                picture(tmp_path / part / name / f"{i}.png", (100 * number, i, 50))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "shape", "mean", "std"),
    [
        ("fashion-mnist", (1, 28, 28), [0.2860], [0.3530]),
    ],
)
def test_the_named_sets_are_complete(source, shape, mean, std):
    data = load_dataset("images", {"source": source})
    assert len(data.train) == 60_000
    assert len(data.validation) == 10_000
    assert data.model == {"image_size": shape[1], "channels": shape[0], "classes": 10}
    assert np.bincount(data.validation.split.labels).tolist() == [1000] * 10
    assert torch.allclose(data.train.mean / 255, torch.tensor(mean), atol=1e-4)
    assert torch.allclose(data.train.std / 255, torch.tensor(std), atol=1e-4)
    drawn = batch(data.train, seed=0, step=0, part=0, parts=1, size=512)
    assert (
        drawn["pixel_values"].shape == (512, *shape)
        and drawn["pixel_values"].dtype == torch.float32
    )
    assert drawn["labels"].shape == (512,) and drawn["labels"].dtype == torch.int64
    assert abs(drawn["pixel_values"].mean()) < 0.1 and abs(drawn["pixel_values"].std() - 1) < 0.1


def test_statistics_against_numpy():
    values = np.random.default_rng(0).integers(0, 256, (2345, 5, 7, 3), dtype=np.uint8)
    mean, std = statistics(Split(values, np.zeros(2345, dtype=np.int64)))
    assert np.allclose(mean, values.mean((0, 1, 2)), rtol=1e-5)
    assert np.allclose(std, values.std((0, 1, 2)), rtol=1e-5)


def test_a_folder_for_each_class(folder):
    data = load_dataset("images", {"source": str(folder)})
    assert data.model == {"channels": 3, "classes": 2}
    assert data.train.split.labels.tolist() == [0, 0, 0, 1, 1, 1]
    drawn = data.train[torch.tensor([0, 5])]
    assert drawn["pixel_values"].shape == (2, 3, 4, 6)
    assert drawn["pixel_values"][:, 0, 0, 0].tolist() == [-1.0, 1.0]
    assert drawn["pixel_values"][:, 2].tolist() == torch.zeros(2, 4, 6).tolist()


def test_grey_folders_have_one_channel(tmp_path):
    for name in ("train/a", "train/b", "validation/a", "validation/b"):
        picture(tmp_path / name / "0.png", 10, mode="L", size=(4, 4))
    assert load_dataset("images", {"source": str(tmp_path)}).model == {
        "image_size": 4,
        "channels": 1,
        "classes": 2,
    }


@pytest.fixture
def classes(tmp_path):
    """Ten images of each of two classes, in a folder whose own path has a hidden part."""
    root = tmp_path / ".photos"
    for name in ("cat", "dog"):
        for number in range(10):
            picture(root / name / f"{number}.png", number)
    return root


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dog/a.gif",
            r"dog/a\.gif cannot be read as an image: give files of type \.jpeg, .*\.webp",
        ),
        ("dog/notes", r"dog/notes cannot be read as an image"),
        ("emu/a.BMP", r"emu/a\.BMP cannot be read as an image"),
        ("dog/part/a.png", r"dog/part is out of place: .* one folder for each class"),
        ("a.png", r"photos/a\.png is out of place: .* one folder for each class"),
    ],
)
def test_no_visible_file_of_a_folder_of_classes_is_left_out_without_a_word(classes, name, message):
    picture(classes / "made.png", 0)
    (classes / name).parent.mkdir(parents=True, exist_ok=True)
    (classes / "made.png").rename(classes / name)
    with pytest.raises(ValueError, match=message):
        load_dataset("images", {"source": str(classes)})


def test_hidden_files_and_folders_are_no_images_and_no_classes(classes):
    (classes / "dog" / "._0.png").write_bytes(b"\0\5\x16\7")
    (classes / ".DS_Store").write_bytes(b"")
    picture(classes / ".ipynb_checkpoints" / "0.png", 0)
    picture(classes / "dog" / ".thumbnails" / "0.png", 0)
    data = load_dataset("images", {"source": str(classes)})
    assert (data.model["classes"], len(data.train), len(data.validation)) == (2, 18, 2)


def test_images_of_every_suffix_and_of_linked_folders_are_read(classes, caplog):
    for number, suffix in enumerate(sorted(SUFFIXES) * 3):
        picture(classes.parent / "emu" / f"{number}{suffix.upper()}", 0)
    (classes / "emu").symlink_to(classes.parent / "emu")
    data = load_dataset("images", {"source": str(classes)})
    assert data.model["classes"] == 3 and len(data.train) + len(data.validation) == 32
    assert data.train[torch.arange(18, 29)]["labels"].unique().tolist() == [2]
    assert not caplog.records


@pytest.mark.parametrize("parts", [("",), ("train", "validation")])
def test_a_class_of_which_nothing_is_held_out_is_told(tmp_path, parts, caplog):
    for part in parts:
        for number in range(10):
            picture(tmp_path / part / "cat" / f"{number}.png", number)
    for name in ("dog", "emu"):
        picture(tmp_path / parts[0] / name / "0.png", 0)
    load_dataset("images", {"source": str(tmp_path)})
    (told,) = [record.getMessage() for record in caplog.records if record.name == "detonation"]
    assert told.startswith(f"{tmp_path}: no image of class dog and 1 more is held out, because")


def test_one_class_alone_and_a_file_are_refused(classes):
    for each in (classes / "dog").iterdir():
        each.unlink()
    with pytest.raises(
        ValueError, match=r"photos has images of one class only, cat: put the images of each"
    ):
        load_dataset("images", {"source": str(classes)})
    with pytest.raises(ValueError, match=r"0\.png holds no images in folders of classes"):
        load_dataset("images", {"source": str(classes / "cat" / "0.png")})


def test_an_image_that_is_too_large_for_pillow_is_named(classes, monkeypatch):
    picture(classes / "dog" / "big.png", 0, size=(60, 60))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(
        ValueError, match=r"dog/big\.png is no image that pillow can read: .* exceeds limit"
    ):
        load_dataset("images", {"source": str(classes), "size": 8})


def test_folders_that_do_not_fit_are_refused(folder):
    source = {"source": str(folder)}
    picture(folder / "validation" / "cow" / "0.png", 0)
    with pytest.raises(ValueError, match="classes that are missing in train: cow"):
        load_dataset("images", source)
    (folder / "validation" / "cow" / "0.png").unlink()
    picture(folder / "train" / "dog" / "9.png", 0, size=(8, 8))
    with pytest.raises(ValueError, match=r"9\.png is 8x8, but the first image is 6x4"):
        load_dataset("images", source)
    (folder / "train" / "dog" / "9.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"9\.png is no image that pillow can read"):
        load_dataset("images", source)
    with pytest.raises(
        ValueError,
        match=r"at least ten images: add images to CLASS/\*\.png, or make the folders train/CLA",
    ):
        load_dataset("images", {"source": str(folder / "validation")})


def test_train_and_validation_must_have_one_shape(tmp_path):
    picture(tmp_path / "train" / "a" / "0.png", 0, size=(4, 4))
    picture(tmp_path / "train" / "b" / "0.png", 0, size=(4, 4))
    picture(tmp_path / "validation" / "a" / "0.png", 0, size=(5, 5))
    source = {"source": str(tmp_path)}
    with pytest.raises(
        ValueError, match=r"0\.png is 5x5, but the first image is 4x4: set data\.size to scale all"
    ):
        load_dataset("images", source)
    assert load_dataset("images", {**source, "size": 6}).validation[torch.tensor([0])][
        "pixel_values"
    ].shape[2:] == (
        6,
        6,
    )


def test_images_of_any_size_are_scaled_and_cut_to_squares(tmp_path):
    wide = Image.new("RGB", (40, 20), (255, 0, 0))
    wide.paste((0, 0, 255), (10, 0, 30, 20))  # the middle, which stays
    for number in range(20):
        (tmp_path / "a").mkdir(exist_ok=True)
        (wide if number % 2 else wide.rotate(90, expand=True)).save(
            tmp_path / "a" / f"{number:02}.png"
        )
    picture(tmp_path / "b" / "0.jpg", 7, size=(9, 9), mode="L")
    picture(tmp_path / "a0" / "0.jpg", 7, size=(9, 9), mode="L")  # too few to hold one out
    data = load_dataset("images", {"source": str(tmp_path), "size": 8})
    assert data.model == {"image_size": 8, "channels": 3, "classes": 3}
    assert (len(data.train), len(data.validation)) == (20, 2)  # every tenth of a class is held out
    pixels = data.train.split.images[range(18)]
    assert (
        pixels.shape == (18, 8, 8, 3)
        and (pixels[..., 2] > 200).all()
        and (pixels[..., 0] < 50).all()
    )
    grey = load_dataset("images", {"source": str(tmp_path), "size": 8, "channels": 1})
    assert grey.model["channels"] == 1 and grey.train.split.images[[18]].max() == 7
    assert len(batch(data.train, seed=0, step=0, part=0, parts=2, size=9)["labels"]) == 9
    assert data.validation.split.labels.tolist() == [0, 0]


@pytest.mark.parametrize("size", [None, 4])
def test_photos_are_turned_upright_as_their_cameras_say(tmp_path, size):
    upright = Image.new("L", (4, 6))
    upright.paste(200, (0, 0, 2, 2))
    back = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(12):
            orientation, turned = list(back.items())[number % 3]
            stored = upright if turned is None else upright.transpose(turned)
            exif = Image.Exif()
            exif[Image.ExifTags.Base.Orientation] = orientation
            stored.save(tmp_path / folder / f"{number:02}.png", exif=exif)
    pixels = load_dataset("images", {"source": str(tmp_path), "size": size}).train.split.images
    assert pixels.shape[1:] == ((4, 4, 1) if size else (6, 4, 1))
    found = pixels[range(3)]
    assert (found == found[:1]).all() and found[0, 0, 0] > found[0, -1, -1]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_a_transparent_picture_lies_on_white(folder, mode):
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        alpha = 128 * (number % 2)
        if mode == "P":
            Image.new(mode, (6, 4), 0).save(path, transparency=bytes([alpha]))
        else:
            picture(path, (*[0] * (len(mode) - 1), alpha), mode=mode)
    data = load_dataset("images", {"source": str(folder)})
    pixels = data.train.split.images[range(6)]
    assert {*pixels.ravel().tolist()} == {127, 255}
    assert pixels.shape[-1] == (1 if mode == "LA" else 3)


def test_a_named_set_is_scaled_to_the_model_too():
    data = load_dataset("images", {"source": "fashion-mnist", "size": 14, "channels": 3})
    assert data.model == {"image_size": 14, "channels": 3, "classes": 10}
    plain = load_dataset("images", {"source": "fashion-mnist", "size": 28}).train.split.images
    assert isinstance(plain, np.ndarray)  # nothing to scale
    assert abs(data.train.split.images[[5]].mean() - plain[5].mean()) < 3


def test_a_picture_that_is_cut_off_is_named(tmp_path):
    for number in range(10):
        picture(tmp_path / "a" / f"{number}.png", number, size=(50, 50))
    picture(tmp_path / "b" / "0.png", 0, size=(50, 50))
    whole = (tmp_path / "a" / "0.png").read_bytes()
    (tmp_path / "a" / "0.png").write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"a/0\.png is no image that pillow can read"):
        load_dataset("images", {"source": str(tmp_path)})
    body = whole.index(b"IDAT")  # its length comes before it
    (tmp_path / "a" / "0.png").write_bytes(
        whole[: body - 4] + (5).to_bytes(4, "big") + whole[body:]
    )
    with pytest.raises(ValueError, match=r"a/0\.png is no image that pillow can read"):
        load_dataset("images", {"source": str(tmp_path)})


def examples(flip, count=64):
    values = np.random.default_rng(0).integers(0, 256, (count, 5, 6, 3), dtype=np.uint8)
    split = Split(values, np.arange(count))
    return Images(split, *statistics(split), flip)


def test_flips_mirror_about_half_of_the_images():
    plain = examples(False)[torch.arange(64)]["pixel_values"]
    flipped = examples(True).augment({"pixel_values": plain}, torch.Generator().manual_seed(0))[
        "pixel_values"
    ]
    mirrored = (flipped == plain.flip(3)).flatten(1).all(1)
    same = (flipped == plain).flatten(1).all(1)
    assert (mirrored | same).all() and 20 < mirrored.sum() < 44


def test_augmentation_depends_on_the_step_and_spares_validation(folder):
    data = load_dataset("images", {"source": str(folder), "flip": True})
    arguments = {"seed": 0, "part": 0, "parts": 1, "size": 6}
    once, again = (batch(data.train, step=1, **arguments)["pixel_values"] for _ in range(2))
    assert torch.equal(once, again)
    assert data.train.flip and not data.validation.flip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "fasion-mnist"}, "did you mean 'fashion-mnist'"),
        ({"label_column": "y"}, "label_column does not apply to source"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_dataset("images", arguments)


def test_pixels_of_16_bits_are_refused(folder):
    values = np.arange(24, dtype=np.uint16).reshape(4, 6) * 2700
    for path in folder.rglob("*.png"):
        Image.fromarray(values).save(path)
    with pytest.raises(
        ValueError, match=r"\.png has pixels of more than 8 bits: save the image with 8"
    ):
        load_dataset("images", {"source": str(folder)})
