"""The notebooks run from their first cell to their last, in minutes."""

import pathlib
import time

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lossless", "roofline"])
def test_a_notebook_runs(name):
  why = "not installed: pip install -e '.[docs]'"
  nbclient = pytest.importorskip("nbclient", reason=why)
  nbformat = pytest.importorskip("nbformat", reason=why)
  notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
  here = {"metadata": {"path": str(FOLDER)}}
  start = time.perf_counter()
  nbclient.NotebookClient(notebook, timeout=300, resources=here).execute()
  assert time.perf_counter() - start < 300
