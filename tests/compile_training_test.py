"""A draft head's training step compiles for a TPU that is not there."""

import json
import runpy

import jax
import pytest

import programs
from specdec.benchmark.target import config_of, source_of
from specdec.compiled import steps
from specdec.report import steps as report
from specdec.training import ahead
from specdec.training.setup import from_config

CONFIGS = programs.SCRIPTS.parent / "configs" / "train"
SMALL = (
  "--mesh=data:2,model:2", f"--config={CONFIGS / 'drafter.py'}:eagle3",
  "--config.options.sequence=32", "--config.options.batch=4",
  "--config.head_config.levels=2", "--config.options.dtype=bfloat16",
)  # fmt: skip


def test_a_small_head_on_four_chips(tmp_path):
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  path = tmp_path / "step.json"
  flags = "--topology=v5e:2x2", "--here", f"--json={path}"
  # libtpu is opened once in a process.
  done = programs.launch("compile_training", *SMALL, *flags)
  assert done.returncode == 0, done.stderr[-2000:]
  assert "no weight of the target is gathered whole" in done.stdout
  document = json.loads(path.read_text())
  [step] = document["steps"]
  assert step["fits"] and step["gathered"] == [] and step["read"] > 0
  # Weights, moments and the target; gradients are temporary.
  plan = document["plan"]
  held = sum(plan.values()) - plan["gradients"]
  assert step["arguments"] == pytest.approx(held, rel=0.15)


def lowered(kind, **changes):
  """The step of one of configs/train/drafter.py, of 4 x 32 tokens."""
  get_config = runpy.run_path(str(CONFIGS / "drafter.py"))["get_config"]
  config = get_config(kind)
  config.options.update(sequence=32, batch=4)
  config.update(changes)
  setup = from_config(config.to_dict())
  step = ahead.step(setup, "data:1", devices=jax.devices()[:1])
  return step.lower()


def arguments(text):
  """Of the main function of a lowered program."""
  [signature] = (x for x in text.splitlines() if "func public @main" in x)
  return signature.split("->")[0]


@pytest.mark.parametrize("kind", ["dflash", "domino", "peagle", "eagle3"])
def test_the_step_is_given_what_training_gives_it(kind):
  """Where drafts begin is drawn of blocks and P-EAGLE, by step and row."""
  text, is_drawn = lowered(kind).as_text(), kind != "eagle3"
  given = arguments(text)
  assert given.count("tensor<4x33xi32>") == 1
  assert given.count("tensor<4xi32>") == (2 if is_drawn else 0)
  assert ("threefry" in text) == is_drawn


@pytest.mark.parametrize("kind, streams", [("dspark", 3), ("recycle", 1)])
def test_a_step_with_a_cache_does_not_run_the_target(kind, streams):
  """It is given hidden states; the target's layers are held and not read."""
  alone, cached = lowered(kind), lowered(kind, cache="states")
  given = [arguments(step.as_text()) for step in (alone, cached)]
  states = "tensor<4x32x384xf32>"
  assert [x.count(states) for x in given] == [0, 1 + streams]
  assert given[1].count("%arg") == given[0].count("%arg") + 1 + streams
  flops = [step.cost_analysis()["flops"] for step in (alone, cached)]
  config = config_of(source_of("stdlib-11m"), "float32")
  layers = config.num_parameters - config.vocab_size * config.width
  assert flops[0] - flops[1] > 2 * 4 * 32 * layers


def test_a_step_that_takes_too_long_or_too_much_is_reported(
  monkeypatch, capsys
):
  commands = []

  def apart(module, argv, patience):
    commands.append((module, argv, patience))
    return {"error": f"not in {patience} s"}

  monkeypatch.setattr(steps, "devices", lambda _: jax.devices())
  monkeypatch.setattr(steps, "open_no_chip", lambda: None)
  monkeypatch.setattr(steps, "compile_apart", apart)
  flags = [*SMALL, "--mesh=data:1", "--patience_seconds=9"]
  with pytest.raises(SystemExit, match="train: not compiled, or too much"):
    programs.run("compile_training", *flags)
  [(module, argv, patience)] = commands
  assert (module, patience) == ("specdec.cli.compile_training", 9)
  assert argv == [*flags, "--here", "--patience_seconds=0"]
  printed = capsys.readouterr().out
  assert "not in 9 s" in printed and "is unknown" in printed
  assert "target 0.02" in printed  # the plan's


def test_what_is_gathered_is_listed():
  one = {"shape": [[64, 32]], "times": 2, "bytes": 8e6, "source": "jit(step)/x"}
  line = report.gathered({"gathered": [one]})
  assert line == (
    "gathered whole on a chip: [[64, 32]], 2 times, 8.0 MB, by jit(step)/x"
  )
