"""The notebooks run from their first cell to their last, in minutes."""

import json
import pathlib
import runpy
import time

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = ["lossless", "roofline"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name):
  why = "not installed: pip install -e '.[docs]'"
  pytest.importorskip("nbclient", reason=why)
  execute = runpy.run_path(str(FOLDER / "execute.py"))["execute"]
  start = time.perf_counter()
  execute(FOLDER / f"{name}.ipynb")
  assert time.perf_counter() - start < 300


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_it_shows_is_of_one_run_in_order(name):
  cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  counts = [cell["execution_count"] for cell in code]
  assert counts == [*range(1, len(code) + 1)]
  shown = [x for cell in code for x in cell["outputs"]]
  assert sum("image/png" in x.get("data", ()) for x in shown) > 2
  assert all(x["output_type"] != "error" for x in shown)
  assert all(x.get("name") != "stderr" for x in shown)
