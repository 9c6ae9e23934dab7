"""The page in a real browser: no errors, nothing fetched, all figures, and readable on a phone."""

import base64
import io

import pytest
from PIL import Image

import browser
from detonation.report.figures import COLOURS, PAPER
from detonation.report.page import write_page
from made import made

FIGURES = ["loss-steps", "loss-bytes", "loss-seconds", "frontier", "step-time"]
PNG = "data:image/png;base64,"
FOUND = browser.found()
pytestmark = pytest.mark.skipif(
    FOUND is None,
    reason=f"needs a browser in PATH, one of {', '.join(browser.NAMES)}: apt-get install chromium",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page about difficult runs: a long name, a hostile name, several levels, and a run that sends nothing."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        made(
            folder / "a-recipe-with-a-name-as-long-as-recipes-can-have-full-20261120-125504",
            "full",
            sent=4_000_000,
        ),
        made(folder / "<img src=x onerror=alert(1)> & \"'%20", "random"),
        made(
            folder / "tiers",
            "full+demo",
            levels=[("rack", 4_000_000), ("site", 9_000)],
            val_accuracy=0.7,
        ),
        made(folder / "none", "none", sent=0),
    ]
    return write_page(runs, folder / "report.html")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    with browser.Browser(FOUND, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def colours(picture):
    """Counts the pixels of each colour, as #rrggbb."""
    found = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    return {f"#{r:02x}{g:02x}{b:02x}": count for count, (r, g, b) in found}


@pytest.mark.long_cases("1280")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_person_can_read_it_on_a_screen_and_on_a_phone(page, shown, tmp_path, width):
    shown.show(page.as_uri(), width)
    assert shown.complaints == []
    fetched = {request for request in shown.requests if not request.startswith("data:")}
    assert fetched == {page.as_uri()}, "nothing else is fetched"
    assert shown.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    boxes = shown.evaluate(
        "[...document.querySelectorAll('figure')].map(f => { const box = f.querySelector('img')"
        ".getBoundingClientRect(); return [f.id, box.left, box.right, box.height] })"
    )
    assert [name for name, *_ in boxes] == FIGURES
    assert all(
        0 <= left < right - 250 and right <= width and height > 90
        for _, left, right, height in boxes
    ), boxes
    (tmp_path / "page.png").write_bytes(shown.screenshot())
    with Image.open(tmp_path / "page.png") as picture:
        seen = colours(picture)
    assert max(seen, key=seen.get) == PAPER
    assert all(seen.get(colour, 0) > 50 for colour in COLOURS[:4]), (
        "each run is drawn in its colour"
    )


def test_each_figure_is_a_sharp_picture(page, shown):
    shown.show(page.as_uri(), 1280)
    pictures = shown.evaluate(
        "[...document.querySelectorAll('figure img')].map(image => image.src)"
    )
    assert len(pictures) == len(FIGURES)
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture.removeprefix(PNG)))) as pixels:
            assert pixels.width > 900 and pixels.height > 300 and len(colours(pixels)) > 20
