"""The README's Python runs, and its file tree is the real one."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_python_example_and_the_new_drafter_run(capsys):
  scope = {}
  for block in re.findall(r"```python\n(.*?)```", TEXT, re.S):
    exec(block, scope)
  printed = capsys.readouterr().out
  assert "target passes" in printed
  lost = re.findall(r"([\d.]+) from the target's distribution", printed)
  assert len(lost) == 2 and float(lost[0]) < 1e-5 and float(lost[1]) > 0.01
  options = dict(max_length=64, sampling=scope["settings"](1, temperature=0.8))
  shared = (scope["params"], scope["prompt"], scope["length"])
  ours = scope["generate"](
    scope["target"],
    scope["repeat"](3),
    scope["acceptance"].coupled(),
    *shared,
    jax.random.key(1),
    **options,
  )
  np.testing.assert_array_equal(ours.tokens, scope["state"].tokens)
  assert jnp.all(ours.length == 64)


def test_every_file_of_the_tree_exists_and_none_is_missing():
  tree = re.search(r"```\nspecdec/\n(.*?)```", TEXT, re.S)[1]
  named = set(re.findall(r"^  (\w+\.\w+|\w+/)", tree, re.M))
  real = {
    path.name + ("/" if path.is_dir() else "")
    for path in (ROOT / "specdec").iterdir()
    if not path.name.startswith("_")
  }
  assert named == real


def test_what_its_commands_write_is_ignored_by_git():
  folders = set(re.findall(r"--(?:output|folder)=(\w+)", TEXT))
  assert {"corpus", "tokenizer", "runs"} <= folders
  ignored = (ROOT / ".gitignore").read_text().splitlines()
  assert {f"/{folder}/" for folder in folders} <= set(ignored)
