"""Fills regions of Markdown pages from results/, so that no number is typed.

  <!-- results: TABLE NAME ... --> ... <!-- end -->
  <!-- value: NAME runs[k=3,group=all].speed.speedup .2f --> ... <!-- end -->

TABLE is one of result_tables.TABLES, NAME a measurement (scripts/reproduce.py
--list). The path of a value leads through a document: [key=value] takes the
entry of a list whose members say so.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from specdec.benchmark import reproduction
from specdec.benchmark.metrics import Estimate
from specdec.report import canvas, result_tables, summary
from specdec.report.result_tables import Missing
from specdec.utils import files
from specdec.utils.spelling import choices, naming

# Not in a code span, where one is explained.
REGION = re.compile(
  r"(?<!`)<!-- (results|value): (.+?) -->(.*?)<!-- end -->", re.S
)
_BEGIN = re.compile(r"(?<!`)<!-- (?:results|value): .+? -->")
_STEP = re.compile(r"(\w+)(?:\[([^\]]*)\])?\.?")


class Documents(dict[str, dict]):
  """The documents of a folder by name; Missing where there is none."""

  def __init__(self, folder: Path):
    names = (path.stem for path in sorted(folder.glob("*.json")))
    super().__init__({name: reproduction.read(folder, name) for name in names})

  def __missing__(self, name: str):
    raise Missing(name)


def pages(root: Path) -> list[Path]:
  """Returns the pages of a checkout whose regions are filled.

  Pages of docs/results/0.1.0 are an archive, which nothing regenerates.
  """
  patterns = "README.md", "docs/*.md", "docs/results/*.md"
  return [path for pattern in patterns for path in sorted(root.glob(pattern))]


def fill(
  text: str,
  documents: Documents,
  draw: Callable[[str, Figure], object] | None = None,
) -> str:
  """Returns a page with each region written anew.

  Args:
    draw: takes the name of a picture beside the page and its figure; without it
      none is drawn.
  """
  rest = REGION.sub(lambda match: match[3], text)
  if unclosed := _BEGIN.search(rest):
    raise ValueError(f"{unclosed[0]} or one before it has no <!-- end -->")
  shown: set[str] = set()  # measurements whose head the page has

  def written(match: re.Match) -> str:
    kind, order, _ = match.groups()
    name, *arguments = shlex.split(order)
    try:
      if kind == "value":
        new = value(documents[name], *arguments)
      else:
        new = "\n\n" + _table(name, arguments, documents, shown, draw) + "\n\n"
    except Missing as error:
      new = error.sentence
      new = f"\n\n{new}\n\n" if kind == "results" else new
    except (KeyError, TypeError, IndexError, ValueError) as error:
      raise ValueError(
        f"<!-- {kind}: {order} -->: {str(error) or type(error).__name__}"
      ) from error
    return f"<!-- {kind}: {order} -->{new}<!-- end -->"

  return REGION.sub(written, text)


def rewrite(pages: Sequence[Path], documents: Documents) -> Iterator[Path]:
  """Fills pages, draws pictures beside them; yields the pages that change."""
  for page in pages:
    text = page.read_text(encoding="utf-8")
    with naming(str(page)):
      new = fill(
        text,
        documents,
        lambda name, x, at=page.parent: canvas.save(x, at / name),
      )
    if new != text:
      files.replace_text(page, new)
      yield page


def _table(table: str, names, documents, shown: set[str], draw) -> str:
  """Returns a table, or picture, and heads of what the page has not shown."""
  if table == "picture":
    return _picture(names, documents, draw)
  every = result_tables.TABLES | summary.TABLES
  if table not in every:
    raise ValueError(f"results: {table}; {choices(table, every)}")
  text = every[table](documents, *names)
  new = [name for name in names if name in documents and name not in shown]
  shown.update(new)
  heads = "\n".join(result_tables.head(documents[name]) for name in new)
  return f"{text}\n\n{heads}".strip()


def _picture(arguments, documents, draw) -> str:
  """Has a picture drawn: FILE NAME, or FILE NAME NAME ... over k."""
  file, *names = arguments
  figure = result_tables.figure(documents, file, names)
  if draw:
    draw(file, figure)
  return f"![{Path(file).stem.replace('_', ' ')}]({file})"


def value(document: dict, path: str, form: str = ".2f") -> str:
  """Returns one value of a document, as text."""
  part = document
  try:
    for name, wanted in _STEP.findall(path):
      part = part[name]
      if wanted:
        pairs = [pair.split("=") for pair in wanted.split(",")]
        [part] = [x for x in part if all(str(x[key]) == y for key, y in pairs)]
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"there is no {path} in it") from error
  if isinstance(part, dict):
    return str(Estimate(**part))
  return format(part, form) if isinstance(part, float) else str(part)
