"""The page of a run while it trains: what it says, who may read it, and how it ends."""

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request

import pytest
import tomli_w

import browser
from detonation.cli.command import run_command as main
from detonation.report import live, page
from limits import until
from made import record

WAITS = {
    "seconds": [[0.0, 2.5], [0.5, 0.0]],
    "network_s": [0.75, 1.25],
    "slowest": 1,
    "lasted_s": 8.0,
}
CONFIG = {
    "scheme": {"name": "demo"},
    "data": {"task": "text", "source": "sotu-sample"},
    "train": {"steps": 40},
    "mesh": {"replicas": 2, "shards": 1, "link": "50mbit,10ms"},
}


def lines(first, last, **more):
    return "".join(
        json.dumps(record(step, 120_000, 40) | more) + "\n" for step in range(first, last + 1)
    )


@pytest.fixture
def run(tmp_path):
    """The directory of a run that has not taken a step."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps(CONFIG))
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


@pytest.fixture
def address(run, monkeypatch):
    monkeypatch.setattr(live, "_EVERY_S", 0.0)
    server = live.serve(run, socket.create_server(("127.0.0.1", 0)))
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown(), server.server_close(), thread.join()


def read(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.read().decode()


def test_it_shows_loss_bytes_and_who_waits_for_whom_and_goes_on(run, address):
    begun = read(address)
    assert (
        "the first step includes the set-up" in begun
        and "demo on sotu-sample · 2 replicas x 1 shards · 40 steps" in begun
    )
    (run / "metrics.jsonl").write_text(lines(1, 9) + lines(10, 10, waits=WAITS))
    page = read(address)
    assert all(
        text in page for text in ("10 of 40", "1.2 MB", "120.0 kB", "10.0%", "3 s</b><span>left")
    )
    rows = page.partition("Who waits for whom")[2].partition("</table>")[0]
    assert all(text in rows for text in ("2.5 s", "0.5 s", "0.8 s", "1.2 s", "for the network"))
    assert [page.count(f'id="{name}"') for name in ("loss-steps", "loss-bytes", "step-time")] == [
        1,
        1,
        1,
    ]
    (run / "metrics.jsonl").write_text(lines(1, 9) + lines(10, 10, waits=WAITS) + lines(11, 12))
    assert "12 of 40" in read(address)


def test_a_run_with_levels_has_as_many_replicas_as_they_come_to(run):
    levels = [
        {"axis": "rack", "replicas": 2, "name": "full"},
        {"axis": "site", "replicas": 3, "name": "demo"},
    ]
    (run / "config.toml").write_text(
        tomli_w.dumps(CONFIG | {"scheme": levels, "mesh": {"shards": 1, "link": ""}})
    )
    assert "full+demo on sotu-sample · 6 replicas x 1 shards" in page.html_of_begun(
        run, "in training", live=True
    )


def test_a_run_that_was_killed_has_a_page_of_its_steps(run, capsys):
    """Also if the last line of its metrics is not whole."""
    (run / "metrics.jsonl").write_text(lines(1, 11)[:-20])
    assert main(["report", str(run)]) == 0
    shown = (run / "report.html").read_text()
    assert all(text in shown for text in ("not finished", "10 of 40", 'id="loss-steps"'))
    assert "setInterval" not in shown
    (run / "config.toml").write_text("=")
    assert main(["report", str(run)]) == 2
    assert "config.toml is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "host", "code"), [("", "elsewhere.example", 403), ("metrics.jsonl", "localhost", 404)]
)
def test_no_other_site_and_no_other_file(address, path, host, code):
    """A name of a page from elsewhere may lead to 127.0.0.1, too."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        read(address + path, Host=host)
    assert refused.value.code == code and refused.value.read() == b""
    refused.value.close()


def test_a_connection_that_asks_nothing_is_closed(run, monkeypatch):
    monkeypatch.setattr(live, "_SILENT_S", 0.01)
    server = live.serve(run, socket.create_server(("127.0.0.1", 0)))
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    with socket.create_connection(server.server_address[:2]) as silent:
        assert silent.recv(1) == b""
    server.shutdown(), server.server_close(), thread.join()


def test_a_name_in_the_recipe_is_text(run, address):
    (run / "config.toml").write_text(
        tomli_w.dumps(CONFIG | {"scheme": {"name": "<script>alert(1)</script>"}})
    )
    assert "<script>alert" not in page.html_of_begun(run, "in training", live=True)


@pytest.mark.skipif(
    browser.found() is None, reason="no browser is installed: apt-get install chromium"
)
def test_the_page_moves_on_by_itself_and_says_when_the_run_has_ended(
    run, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(live, "_EVERY_S", 0.0)
    (run / "metrics.jsonl").write_text(lines(1, 10, waits=WAITS))
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(
            browser.Browser(browser.found(), tmp_path_factory.mktemp("profile"))
        )
        server = live.serve(run, socket.create_server(("127.0.0.1", 0)))
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        shown.show(f"http://127.0.0.1:{server.server_address[1]}/", 390)
        assert (
            shown.complaints == [] and shown.evaluate("document.documentElement.scrollWidth") == 390
        )
        assert shown.evaluate("document.querySelector('.tiles b').innerText") == "10 of 40"
        (run / "metrics.jsonl").write_text(lines(1, 20, waits=WAITS))
        refreshed = "refresh().then(() => document.querySelector('.tiles b').innerText)"
        shown.evaluate("document.querySelector('details').open = true")
        assert shown.evaluate(refreshed, wait=True) == "20 of 40" and shown.evaluate(
            "document.querySelector('details').open"
        )
        server.shutdown(), server.server_close(), thread.join()
        ended = "refresh().then(() => document.querySelector('header p').innerText)"
        # a browser may hold a spare connection, whose thread of the server still answers once
        until(lambda: shown.evaluate(ended, wait=True).startswith("The run has ended"))
