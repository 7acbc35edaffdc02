"""Compiles the real steps for a TPU that is not attached, and reads them off.

  pip install libtpu                       # needs no TPU
  python scripts/compile_tpu.py --topology=v6e:2x4 --mesh=model:8 \\
    --target=preset:llama3-70b --drafter='model(preset:llama3-1b)' \\
    --batch=8 --k=4
  python scripts/compile_tpu.py --topology=v5e:2x2 --mesh=model:4 \\
    --target=preset:llama3-1b --drafter=lookup
  python scripts/compile_tpu.py --topology=v5e:2x2 --mesh=data:4 \\
    --target=stdlib-11m --drafter='eagle(eagle)' --steps=draft,verify

Prefill, draft, verify, accept and the whole decoding loop are lowered from
shapes alone and compiled by TPU's own compiler. Of each it prints, per chip,
what memory holds and whether it fits, FLOPs, bytes of main memory (and the
cost model's count), collectives, and how long compiling took. Every step
is compiled in a process of its own, for at most --patience_seconds.
"""

import pathlib

from specdec.benchmark import abstract, results
from specdec.benchmark.setup import Setup
from specdec.cli import app, setup_flags
from specdec.compiled import lowering, steps
from specdec.report import steps as report
from specdec.utils import files, terminal
from specdec.utils.spelling import choices

# Flags of programs that decode, which make no difference to what is compiled.
_LEFT_OUT = (
  "chat", "compilation_cache", "max_new_tokens", "prompt_file",
  "random_weights", "seed", *setup_flags.PROCESSES,
)  # fmt: skip
_MODULE = "specdec.cli.compile_tpu"
_PROMPT = 1024  # tokens, if a row has room for more


def define(flags: app.Flags) -> None:
  setup_flags.define(flags, without=_LEFT_OUT)
  flags.values.set_default("dtype", "bfloat16")
  flags.string("topology", "v5e:2x4", "Kind and shape of the TPU slice.")
  flags.integer("context", 4096, "Tokens of a row, prompt and text.")
  flags.list("steps", list(lowering.STEPS), "Which of them.")
  flags.integer("patience_seconds", 600, "For a step; 0: no limit.")
  flags.string("hlo", None, "Folder for the optimised programs.")
  flags.bool("here", False, "Compile in this process; no time limit.")


def read(options: app.Options) -> Setup:
  """Returns the Setup whose steps are compiled, of flags that can work."""
  setup_flags.apply_config(options)
  app.check_at_least(options, 0, "patience_seconds")
  app.check_at_least(options, 2, "context")
  given = "patience_seconds" in options.given
  if options.here and given and options.patience_seconds:
    raise ValueError("--here has no time limit: leave --patience_seconds out")
  if options.mesh is None:
    raise ValueError("give --mesh, e.g. --mesh=model:8")
  for name in options.steps:
    if name not in lowering.STEPS:
      raise ValueError(f"--steps={name}; {choices(name, lowering.STEPS)}")
  app.check_writable("--json", options.json)
  if options.hlo:
    app.check_folder("--hlo", options.hlo)
  prompt = min(options.context - 1, _PROMPT)
  return setup_flags.setup_of(
    options,
    random_weights=True,
    prompt_size=prompt,
    max_new_tokens=options.context - prompt,
  )


def compile_tpu(options: app.Options) -> None:
  """Compiles the steps, each in a process of its own, and prints a table."""
  steps.open_no_chip()
  setup, chip = read(options), steps.chip_of(options.topology)
  target = abstract.target(setup, steps.devices(options.topology))
  parts = setup, target, abstract.drafter(setup, target)
  lowered, plan = abstract.steps(*parts), abstract.plan(*parts)
  estimates = abstract.estimates(*parts, chip)
  terminal.report(f"on each chip, of its {chip.memory / 2**30:.0f} GiB: {plan}")
  # Rows that lag are rare: a draft model's loop for them is not run.
  blocks = abstract.loops(*parts, chip)
  counts = {"draft": blocks | {"": 0.0}} if target.drafts else {}
  compiled = []
  for name in options.steps:
    with terminal.progress(f"compiling {name}"):
      if options.here:
        count = counts.get(name, blocks)
        step, text = steps.compile_step(lowered[name], count)
        if options.hlo:
          folder = pathlib.Path(options.hlo)
          folder.mkdir(parents=True, exist_ok=True)
          files.replace_file(folder / f"{name}.txt", text)
      else:
        argv = [*options.argv, f"--steps={name}", "--here"]
        argv += ["--patience_seconds=0"]
        step = steps.compile_apart(_MODULE, argv, options.patience_seconds)
    compiled.append({"step": name, **step})
  terminal.report(report.table(compiled, estimates, chip.memory))
  for step in compiled:
    if "error" not in step:
      step["fits"] = steps.held(step) <= chip.memory
  if options.json:
    document = setup_flags.header(options, setup) | {"steps": compiled}
    document |= {"cost_model": estimates, "memory": chip.memory}
    results.write_json(options.json, document | {"plan": plan.parts})
  bad = [step["step"] for step in compiled if not step.get("fits")]
  if bad and not options.here:
    raise ValueError(f"{', '.join(bad)}: not compiled, or too much for a chip")


main = app.Program(__doc__, define, compile_tpu)

if __name__ == "__main__":
  main.launch()
