"""The page in a real browser: no errors, nothing fetched, all figures, and readable on a phone in dark mode."""

import io
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image

import browser
from detonation.report.figures import DARK, LIGHT, NIGHT, PAPER
from detonation.report.page import write_page
from made import PLAN, made

FIGURES = ["loss-steps", "loss-bytes", "loss-seconds", "step-time", "bytes-per-step"]
FOUND = browser.found()
pytestmark = pytest.mark.skipif(
    FOUND is None, reason=f"needs a browser in PATH, one of {', '.join(browser.NAMES)}: apt-get install chromium"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page about difficult runs: a long name, a hostile name, several levels, and a run that sends nothing."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        made(folder / "a-recipe-with-a-name-as-long-as-recipes-can-have-full-20261120-125504", "full", sent=4_000_000),
        made(folder / "<img src=x onerror=alert(1)> & \"'%20", "random"),
        made(folder / "tiers", "full+demo", levels=[("rack", 4_000_000), ("site", 9_000)], val_accuracy=0.7),
        made(folder / "none", "none", sent=0),
    ]
    chosen = {"chosen": PLAN["options"][12], "why": "it waits least"}
    (runs[1] / "plan.json").write_text(json.dumps(PLAN | chosen))
    return write_page(runs, folder / "report.html")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    with browser.Browser(FOUND, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def colours(picture):
    """Counts the pixels of each colour, as #rrggbb."""
    found = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    return {f"#{r:02x}{g:02x}{b:02x}": count for count, (r, g, b) in found}


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (390, True)])
def test_a_person_can_read_it_on_a_screen_and_on_a_phone(page, shown, tmp_path, width, dark):
    shown.show(page.page.as_uri(), width, dark)
    assert shown.complaints == []
    assert set(shown.requests) == {page.page.as_uri()}, "nothing else is fetched"
    assert shown.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    boxes = shown.evaluate(
        "[...document.querySelectorAll('figure')].map(f => { const box = f.querySelector('svg[role]')"
        ".getBoundingClientRect(); return [f.id, box.left, box.right, box.height] })"
    )
    assert [name for name, *_ in boxes] == FIGURES
    assert all(0 <= left < right - 250 and right <= width and height > 90 for _, left, right, height in boxes), boxes
    texts = shown.evaluate(
        "Math.min(...[...document.querySelectorAll('figure text')].map(t => t.getBoundingClientRect().height))"
    )
    assert texts >= 10, "the smallest text of a figure, in pixels"

    (tmp_path / "page.png").write_bytes(shown.screenshot())
    with Image.open(tmp_path / "page.png") as picture:
        seen = colours(picture)
    runs, background = (DARK, NIGHT) if dark else (LIGHT, PAPER)
    assert max(seen, key=seen.get) == background
    assert all(seen.get(colour, 0) > 50 for colour in runs[:4]), "each run is drawn in its colour"


def test_its_links_lead_to_the_raw_data_and_to_a_picture_of_each_figure(page, shown):
    shown.show(page.page.as_uri(), 1280)
    links = shown.evaluate("[...document.querySelectorAll('a')].map(a => a.href)")
    files = [unquote(urlsplit(link).path) for link in links]
    assert sum(name.endswith("metrics.jsonl") for name in files) == 4 and len(files) == len(FIGURES) + 4 * 4 + 1
    assert {str(picture) for picture in page.pictures} <= set(files)
    assert all(Path(name).stat().st_size for name in files)
    for picture in page.pictures:
        with Image.open(io.BytesIO(picture.read_bytes())) as pixels:
            assert pixels.width > 900 and pixels.height > 300 and len(colours(pixels)) > 20


def test_the_plan_is_a_table_and_the_rest_of_it_folds_open(page, shown):
    shown.show(page.page.as_uri(), 390)
    section = "[...document.querySelectorAll('section')].find(s => s.innerText.startsWith('The plan'))"
    rows = f"{section}.querySelectorAll('tbody tr')"
    assert shown.evaluate(f"{rows}.length") == len(PLAN["options"])
    assert shown.evaluate(f"[...{rows}].filter(r => r.checkVisibility()).length") == 10
    assert shown.evaluate("document.querySelector('tr.marked:first-child th').innerText") == "diloco(every=11)"
    assert shown.evaluate(f"{section}.innerText.includes('Chosen by this plan: it waits least')")
