"""Builds the site: pip install -e ".[docs]" && python -m sphinx docs site

It is complete: no font, script or picture comes from elsewhere. Its first page
is the README, and files of the repository that a page links to become pages.
"""

import os
import pathlib
import posixpath
import re
import shutil
import textwrap

ROOT = pathlib.Path(__file__).parents[1]

project = "specdec"
copyright = "the specdec authors"
extensions = [
  "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode",
]  # fmt: skip
html_theme = "sphinx_book_theme"
html_title = "specdec"
html_theme_options = {
  "navbar_persistent": [],
  "show_toc_level": 2,
  "use_download_button": False,
}
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
exclude_patterns = ["results/0.1.0/*.json"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks/execute.py runs them
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
default_role = "code"
napoleon_use_ivar = True
suppress_warnings = ["myst.header", "ref.python"]

written = set()  # pages below docs/source
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def _place(path: str) -> str:
  """Returns where below docs the site has a file of the repository."""
  if path == "README.md":
    return "index.md"
  if path.startswith("docs/"):
    return path.removeprefix("docs/")
  return f"source/{path}" + ("" if path.endswith(".md") else ".md")


def _resolve(page: str, link: str) -> str:
  """Returns the path from the repository's root that a page's link means."""
  return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _content(path: str) -> str:
  """Returns the page of a file or folder outside docs."""
  file = ROOT / path
  if file.suffix == ".md":
    return _pointed(path, file.read_text())
  if file.is_dir():
    names = sorted(x.name for x in file.iterdir() if x.name[0] not in "._")
    return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names)
  name = {".cc": "cpp", ".py": "python", ".jsonl": "json"}.get(file.suffix)
  return f"# {path}\n\n````{name or 'text'}\n{file.read_text().rstrip()}\n````"


def _pointed(page: str, text: str) -> str:
  """Points a page's links at the site, and writes what they point at."""

  def point(match):
    path = _resolve(page, match[1])
    if not (ROOT / path).exists():
      return match[0].replace("](", "] (") if "0.1.0" in page else match[0]
    place = _place(path)
    target = ROOT / "docs" / place
    if (ROOT / path).is_dir() and path.startswith("docs/"):
      place += "/README.md"
    elif place.startswith("source/") and target not in written:
      written.add(target)
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_text("---\norphan: true\n---\n\n" + _content(path))
    anchor = match[2] if match[2] and path.endswith(".md") else ""
    start = posixpath.dirname(_place(page)) or "."
    return f"]({os.path.relpath(place, start)}{anchor})"

  return LINK.sub(point, text)


def on_start(app) -> None:
  """Writes the pages that lie outside docs; git ignores them."""
  shutil.rmtree(ROOT / "docs" / "source", ignore_errors=True)
  pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
  for page in pages:
    _pointed(page.relative_to(ROOT).as_posix(), page.read_text())
  _pointed("README.md", "[](CHANGELOG.md) [](CONTRIBUTING.md)")


def on_read(app, name: str, source: list[str]) -> None:
  """Puts the README before the contents, and points links at the site."""
  if name == "index":
    readme = (ROOT / "README.md").read_text()
    source[0] = _pointed("README.md", readme) + "\n" + source[0]
  elif not name.startswith("source/"):
    source[0] = _pointed(f"docs/{name}.md", source[0])
  if name.startswith("results/0.1.0"):
    source[0] = "---\norphan: true\n---\n\n" + source[0]


def on_docstring(app, what, name, obj, options, lines: list[str]) -> None:
  """Shows what a docstring indents, and lists of functions, as it stands."""
  paragraphs = "\n".join(lines).split("\n\n")
  for i, text in enumerate(paragraphs):
    if text.startswith("  ") or re.match(r"[a-z_]+\(.*\n ", text, re.S):
      paragraphs[i] = "::\n\n" + textwrap.indent(text, "  ")
    else:
      paragraphs[i] = re.sub(r"\*(?! )", r"\*", text)
  lines[:] = "\n\n".join(paragraphs).split("\n")


def setup(app) -> None:
  app.connect("autodoc-process-docstring", on_docstring, priority=900)
  app.connect("builder-inited", on_start)
  app.connect("source-read", on_read)
