"""Commands that docs/sharding.md sends to clusters: the programs take them."""

import importlib
import pathlib
import re
import shlex

import pytest
import yaml  # which Orbax and ml_collections need

from specdec.utils import remote

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sharding.md").read_text()


def blocks(language):
  return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def manifest():
  [block] = blocks("yaml")
  return yaml.safe_load(block)


def worker():
  [job] = manifest()["spec"]["replicatedJobs"]
  return job["template"]["spec"]


def in_bash():
  """Commands of ours, also those that other commands are given."""
  text = "\n".join(blocks("bash")).replace("\\\n", " ")
  text = re.sub(r"&&\n *", "&& ", text)
  found = []
  waiting = [shlex.split(x, comments=True) for x in text.splitlines()]
  while waiting:
    words = waiting.pop()
    nested = [x.partition("=")[2] for x in words if x.startswith("--command=")]
    waiting += [shlex.split(x) for x in nested]
    for number, word in enumerate(words):
      script = re.fullmatch(r"scripts/(\w+)\.py", word)
      if script or (word == "specdec" and number == 0):
        rest = words[number + 1 :]
        found.append([script[1], *rest] if script else rest)
  return found


def commands():
  [container] = worker()["template"]["spec"]["containers"]
  assert container["command"][0] == "specdec"
  return [container["command"][1:], *in_bash()]


def test_every_kind_of_command_is_found():
  names = sorted(words[0] for words in commands())
  others = "bench", "compile_tpu", "compile_training", "prepare_data"
  assert names == sorted([*others, *["generate"] * 5, *["train"] * 2])


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_the_program_takes_the_flags(monkeypatch, words):
  monkeypatch.chdir(ROOT)  # of configs
  monkeypatch.setattr(remote, "_has_gcsfs", lambda: True)
  main = importlib.import_module(f"specdec.cli.{words[0]}").main
  options = main.parse(words)
  assert options.given and not options.arguments
  for flag in words[1:]:
    assert flag.startswith("--")
    assert flag[2:].partition("=")[0] in {*options.given}
    if "=gs:" in flag:
      assert str(remote.as_path(flag.partition("=")[2])).startswith("gs://")


def test_the_manifest_asks_for_the_slice_that_the_mesh_needs():
  job, pod = worker(), worker()["template"]["spec"]
  [container] = pod["containers"]
  ways = [
    int(number)
    for flag in container["command"]
    for number in re.findall(r":(\d+)", flag.removeprefix("--mesh="))
    if flag.startswith("--mesh=")
  ]
  chips = (
    container["resources"]["limits"]["google.com/tpu"] * job["completions"]
  )
  topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
  across, down = map(int, topology.split("x"))
  assert ways[0] * ways[1] == chips == across * down
  assert job["completions"] == job["parallelism"]
  mounted = {x["name"] for x in container["volumeMounts"]}
  assert mounted == {x["name"] for x in pod["volumes"]}
  [prompts] = [x for x in container["command"] if x.startswith("--prompt_file")]
  [mount] = container["volumeMounts"]
  assert prompts.partition("=")[2].startswith(mount["mountPath"] + "/")


def test_the_script_has_every_word_that_the_page_gives_it():
  script = (ROOT / "scripts" / "tpu_vm.sh").read_text()
  known = {*re.findall(r"^  (\w+)\)", script, re.M)}
  known |= {*re.findall(r"^  (\w+)\) ", script, re.M)}
  given = {
    *re.findall(r"scripts/tpu_vm\.sh +(\w+) ", "\n".join(blocks("bash")))
  }
  helped = {*re.findall(r"^#   scripts/tpu_vm\.sh +(\w+) ", script, re.M)}
  assert given <= known == helped
