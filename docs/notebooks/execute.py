"""Runs the notebooks and keeps what they show, their progress left out.

  python docs/notebooks/execute.py      # on a machine that does nothing else

Their last cells measure speed.
"""

from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent


def execute(path: Path) -> nbformat.NotebookNode:
  """Returns a notebook with the outputs of its cells, run from the first."""
  notebook = nbformat.read(path, as_version=4)
  here = {"metadata": {"path": str(FOLDER)}}
  client = nbclient.NotebookClient(
    notebook,
    timeout=300,
    resources=here,
    record_timing=False,
    coalesce_streams=True,
  )
  return client.execute()


def main() -> None:
  for path in sorted(FOLDER.glob("*.ipynb")):
    notebook = execute(path)
    for cell in notebook.cells:
      if cell.cell_type == "code":
        cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
    nbformat.write(notebook, path)
    print(path)


if __name__ == "__main__":
  main()
