"""README and docs: their Python runs, and what they name exists."""

import contextlib
import importlib
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec
from specdec.benchmark.setup import Setup

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text()
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose links are followed; the paths of 0.1.0 are its own.
LINKED = [
  *PAGES,
  *sorted((ROOT / "docs" / "results").rglob("*.md")),
  ROOT / "results" / "README.md",
  ROOT / "CHANGELOG.md",
  ROOT / "CONTRIBUTING.md",
  ROOT / "specdec" / "shipped" / "README.md",
]
TRACKED = ("specdec", "scripts", "configs", "tests", "docs")


def name_of(page: pathlib.Path) -> str:
  return str(page.relative_to(ROOT))


def run_blocks(page: pathlib.Path) -> dict:
  """Executes the Python blocks of a page in one scope, and returns it."""
  scope = {}
  for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
    exec(block, scope)
  return scope


def commands(text: str) -> list[str]:
  """Commands in bash blocks and code spans that run a script of ours."""
  blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
  lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
  spans = re.findall(r"`((?:python )?scripts/[^`]*)`", text)
  return [line.split("#")[0] for line in lines if "scripts/" in line] + spans


def anchors(page: pathlib.Path) -> set[str]:
  """Names under which headings of a page can be linked, as GitHub has them."""
  headings = re.findall(r"^#+ (.*)$", page.read_text().lower(), re.M)
  return {re.sub(r"[^\w\- ]", "", x).replace(" ", "-") for x in headings}


def test_readme_is_short():
  assert len(TEXT.splitlines()) < 150


@pytest.fixture(scope="module")
def extending():
  """What the Python of docs/extending.md defines, and what it prints."""
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    scope = run_blocks(ROOT / "docs" / "extending.md")
  return scope, printed.getvalue()


def test_the_python_of_the_readme_and_its_drafter_run(capsys, extending):
  scope = run_blocks(README)
  printed = capsys.readouterr().out
  assert re.search(r"speedup \d\.\d+ ± \d\.\d+ \(n = 3\)", printed)
  comparison = scope["comparison"]
  assert comparison.differences("speculative") == ()
  for results in comparison.results:
    fast, slow = results.values()
    assert len(fast.texts[0]) == slow.num_rounds == 128 > fast.num_rounds

  other = extending[0]
  ours = other["generate"](
    other["target"],
    scope["repeat"](3),
    other["acceptance"].coupled(),
    *other["inputs"],
    **other["options"],
  )
  np.testing.assert_array_equal(ours.tokens, other["ours"].tokens)
  assert ours.stats.accepted.sum() > 0


def test_the_python_of_extending_runs(extending):
  scope, printed = extending
  assert "same tokens: True" in printed
  errors = re.findall(r"([\d.]+) from the target's distribution", printed)
  assert len(errors) == 2
  assert float(errors[0]) < 1e-5 and float(errors[1]) > 0.01
  outcomes = [
    scope["enumeration"].emitted(rule, scope["drafts"], scope["wanted"])
    for rule in (scope["half"](), scope["cautious"]())
  ]
  exact = scope["enumeration"].text_distribution(scope["wanted"])
  assert scope["enumeration"].distance(outcomes[1].joint, exact) < 1e-5
  assert outcomes[1].accepted == pytest.approx(outcomes[0].accepted)
  ours = scope["ours"]
  assert jnp.all(ours.length == 64) and ours.stats.accepted.sum() > 0
  state = scope["generate"](
    scope["target"],
    scope["unigram"](jnp.zeros(256), 2),
    scope["acceptance"].coupled(),
    *scope["inputs"],
    **scope["options"],
  )
  np.testing.assert_array_equal(state.tokens, scope["baseline"].tokens)
  jax.block_until_ready(state)


def test_every_file_of_the_tree_exists_and_none_is_missing():
  tree = re.search(r"```\nspecdec/\n(.*?)```", TEXT, re.S)[1]
  named = re.findall(r"\b\w+(?:\.py|/)(?=\s)", tree)
  real = {
    path.name + ("/" if path.is_dir() else "")
    for path in (ROOT / "specdec").iterdir()
    if not path.name.startswith(("_", "py.typed"))
  }
  assert sorted(named) == sorted(real)


def test_the_citation_names_the_version():
  citation = (ROOT / "CITATION.cff").read_text()
  assert f"\nversion: {specdec.__version__}\n" in citation
  assert f"version = {{{specdec.__version__}}}" in TEXT


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page):
  text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)

  def is_broken(link: str) -> bool:
    path, _, anchor = link.partition("#")
    other = (page.parent / path).resolve() if path else page
    return not other.exists() or (anchor and anchor not in anchors(other))

  links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)
  assert [link for link in links if is_broken(link)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
  paths = re.findall(
    rf"(?<![\w/.-])((?:{'|'.join(TRACKED)})/[\w./-]*\w)", page.read_text()
  )
  assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_that_commands_give_are_the_programs(page):
  given = [
    (program[1], flag)
    for command in commands(page.read_text())
    if (program := re.search(r"scripts/(\w+)\.py", command))
    for flag in re.findall(r"(?<= )--(\w+)", command[program.end() :])
  ]
  flags = {
    name: importlib.import_module(f"specdec.cli.{name}").main.flag_values(
      [name]
    )
    for name, _ in given
  }
  assert [
    f"{name} --{flag}"
    for name, flag in given
    if not {flag, flag.removeprefix("no")} & {*flags[name], "help"}
  ] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shapes_and_rules_that_a_page_names_are_accepted(page, monkeypatch):
  """But for those with a placeholder, as FILE, N or three dots."""
  monkeypatch.chdir(ROOT)
  named = re.findall(r"--(shape|acceptance)='([^']*)'", page.read_text())
  for name, call in named:
    if not re.search(r"\b[A-Z]+\b|\.\.\.", call):
      Setup(k=3, temperature=1.0, **{name: call})


def test_what_commands_write_is_ignored_by_git():
  text = "".join(page.read_text() for page in PAGES)
  folders = {*re.findall(r"--(?:output|folder)=(\w+)\b(?!:)", text)}
  folders -= {"DIR", "DIR2"}
  assert {"corpus", "tokenizer", "runs"} <= folders
  ignored = (ROOT / ".gitignore").read_text().splitlines()
  assert {f"/{folder}/" for folder in folders} <= {*ignored}


def test_design_has_every_rule_and_trap_that_the_code_names():
  design = (ROOT / "docs" / "design.md").read_text()
  rules = {*re.findall(r"^(\d+)\. \*\*", design, re.M)}
  traps = {*re.findall(r"^\| (b\d\d) \|", design, re.M)}
  assert rules == {str(n + 1) for n in range(11)}
  sources = {
    folder: "".join(path.read_text() for path in (ROOT / folder).rglob("*.py"))
    for folder in ("specdec", "scripts", "tests")
  }
  text = "".join(sources.values())
  numbers = re.findall(r"\brules? (\d+)(?: and (\d+))?", text)
  assert {n for pair in numbers for n in pair if n} <= rules
  tests = re.findall(r"def test_((?:b\d\d_)+)", sources["tests"])
  assert {*"".join(tests).strip("_").split("_")} == traps
