"""The notebook of the examples runs from its first cell to its last, and is kept without outputs."""

import subprocess
import sys
from pathlib import Path

import pytest

from limits import LIMIT_S

nbformat = pytest.importorskip(
    "nbformat", reason="nbclient is not installed: pip install -e '.[dev]'"
)
pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[dev]'")
NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"
RUN = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
nbformat.write(book, sys.argv[2])
"""
"""In a process of its own: a client has threads, and other tests fork this one."""


def test_the_notebook_is_kept_without_outputs():
    cells = [
        cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"
    ]
    assert cells and all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.long  # a kernel of Jupyter; what it calls is tests/train/test_simulate.py
def test_the_notebook_runs_and_draws(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    done = tmp_path / "done.ipynb"
    subprocess.run([sys.executable, "-c", RUN, NOTEBOOK, done], check=True, timeout=LIMIT_S)
    book = nbformat.read(done, as_version=4)
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert [line.split(",")[0] for line in printed.splitlines()] == ["full", "demo", "diloco"], (
        printed
    )
    assert any("image/png" in output.get("data", {}) for output in outputs)
