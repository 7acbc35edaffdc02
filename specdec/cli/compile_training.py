"""Compiles a draft head's training step for a TPU slice that is not there.

  pip install libtpu                       # needs no TPU
  python scripts/compile_training.py --topology=v5e:4x4 \\
    --mesh=data:2,model:8 --config=configs/train/published.py:eagle3 \\
    --config.target=preset:llama3-8b

The config is that of train.py, whose texts are not read; its target may be a
preset. With `cache` the step is given the target's hidden states, and does not
run the target. The step is lowered from shapes alone and compiled by TPU's own
compiler, in a process of its own, for at most --patience_seconds. Printed are,
per chip, what memory holds and whether it fits, FLOPs, bytes of main memory,
collectives, how long compiling took, and which of the target's weights, shared
out over the chips, a chip gathers whole. Loops over blocks do not occur in it:
what is counted is exact.
"""

import dataclasses
import pathlib

from specdec.benchmark import provenance, results
from specdec.cli import app, setup_flags
from specdec.compiled import steps
from specdec.report import steps as report
from specdec.training import ahead
from specdec.training.setup import HeadSetup, from_config
from specdec.utils import files, terminal

_MODULE = "specdec.cli.compile_training"
_STEP = "train"


def define(flags: app.Flags) -> None:
  text = "Config of train.py, of a draft head."
  flags.config("config", text, "train/*.py")
  setup_flags.define_mesh(flags.without(setup_flags.PROCESSES))
  flags.string("topology", "v5e:4x4", "Kind and shape of the TPU slice.")
  flags.integer("patience_seconds", 1200, "For compiling; 0: no limit.")
  flags.string("hlo", None, "File for the optimised program.")
  flags.string("json", None, "Write the results here.")
  flags.bool("here", False, "Compile in this process; no time limit.")


def read(options: app.Options) -> HeadSetup:
  """Returns the setup whose step is compiled, of flags that can work."""
  app.check_at_least(options, 0, "patience_seconds")
  given = "patience_seconds" in options.given
  if options.here and given and options.patience_seconds:
    raise ValueError("--here has no time limit: leave --patience_seconds out")
  if options.config is None:
    raise ValueError("give --config, as configs/train/published.py:eagle3")
  if options.mesh is None:
    raise ValueError("give --mesh, e.g. --mesh=data:2,model:8")
  app.check_writable("--json", options.json)
  app.check_writable("--hlo", options.hlo)
  setup = from_config(options.config.to_dict())
  if not isinstance(setup, HeadSetup):
    raise ValueError("--config is not that of a draft head")
  return setup


def compile_training(options: app.Options) -> None:
  """Compiles the step in a process of its own, and prints a table."""
  steps.open_no_chip()
  setup, chip = read(options), steps.chip_of(options.topology)
  step = ahead.step(
    setup, options.mesh, options.draft_ways, steps.devices(options.topology)
  )
  terminal.report(
    f"on each chip, of its {chip.memory / 2**30:.0f} GiB: {step.plan}, and "
    "activations"
  )
  with terminal.progress(f"compiling {_STEP}"):
    if options.here:
      compiled, text = steps.compile_step(
        step.lower, shared_out=step.shared_out
      )
      if options.hlo:
        files.replace_file(pathlib.Path(options.hlo), text)
    else:
      argv = [*options.argv, "--here", "--patience_seconds=0"]
      compiled = steps.compile_apart(_MODULE, argv, options.patience_seconds)
  if "error" not in compiled:
    compiled["fits"] = steps.held(compiled) <= chip.memory
  compiled = {"step": _STEP, **compiled}
  terminal.report(report.table([compiled], {}, chip.memory))
  terminal.report(report.gathered(compiled))
  if options.json:
    names = "topology", "mesh", "draft_ways"
    settings = {name: getattr(options, name) for name in names}
    settings["config"] = dataclasses.asdict(setup)
    document = provenance.header(settings, [])
    document |= {"steps": [compiled], "cost_model": {}, "memory": chip.memory}
    results.write_json(options.json, document | {"plan": step.plan.parts})
  if not compiled.get("fits") and not options.here:
    raise ValueError(f"{_STEP}: not compiled, or too much for a chip")


main = app.Program(__doc__, define, compile_training)

if __name__ == "__main__":
  main.launch()
