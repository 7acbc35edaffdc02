"""Compiles the real steps for a TPU that is not attached, and reads them off.

  pip install libtpu                       # needs no TPU
  python scripts/compile_tpu.py --topology=v6e:2x4 --mesh=model:8 \\
    --target=preset:llama3-70b --draft=preset:llama3-1b --batch=8 --k=4
  python scripts/compile_tpu.py --topology=v5e:2x2 --mesh=model:4 \\
    --target=preset:llama3-1b --drafter=lookup

Prefill, draft, verify, accept and the whole decoding loop are lowered from
shapes alone and compiled by TPU's own compiler. Of each it prints, per chip,
what memory holds and whether it fits, FLOPs, bytes of main memory (beside the
cost model's own count), collectives, and how long compiling took. Every step
is compiled in a process of its own, for at most --patience_seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server is asked
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no chip is opened
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import _decoding
import _flags
import _main
import _mesh
from absl import flags
from jax.experimental import topologies

from specdec import checkpoints, sampling
from specdec.benchmark import results
from specdec.compiled import hlo, lowering, memory_plan, traffic
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment
from specdec.utils import files, terminal
from specdec.utils.terminal import columns

_BEFORE = set(flags.FLAGS)
flags.DEFINE_string("topology", "v5e:2x4", "Kind and shape of the TPU slice.")
flags.DEFINE_integer("context", 4096, "Tokens of a row, prompt and text.")
flags.DEFINE_list("steps", list(lowering.STEPS), "Which of them.")
flags.DEFINE_integer("patience_seconds", 600, "For compiling one step.")
flags.DEFINE_string("hlo", None, "Folder for the optimised programs.")
flags.DEFINE_bool("here", False, "Compile in this process; no time limit.")
FLAGS = flags.FLAGS
flags.adopt_module_key_flags(_flags)
_OWN = sorted({*FLAGS} - _BEFORE)
FLAG_NAMES = [*_flags.SHARED, *_OWN]
_KNOWN = (
  "v4:2x2x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:16x16", "v5p:2x2x1",
  "v6e:2x4", "v6e:4x4", "v6e:16x16", "tpu7x:2x2x1",
)  # fmt: skip
_CHIPS = {"tpu7x": "v7"}


def devices() -> list:
  """The chips of --topology.

  Raises:
    ValueError: libtpu is not installed, or knows no such slice.
  """
  try:
    return topologies.get_topology_desc(
      topology_name=FLAGS.topology, platform="tpu"
    ).devices
  except Exception as error:  # what libtpu raises has no type of its own
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ValueError(
      f"--topology={FLAGS.topology}: {reason}. It needs libtpu (pip install "
      f"libtpu); known to work: {', '.join(_KNOWN)}"
    ) from error


def prepared():
  """Models of shapes, where they lie, and what lowers each step."""
  chips_there = devices()
  configs = [
    _decoding.shape_of(_decoding.source_of(name))
    for name in ("target", "draft")
    if FLAGS[name].value
  ]
  places = _mesh.places(*[*configs, None][:2], chips_there)
  if places is None:
    raise ValueError("give --mesh, e.g. --mesh=model:8")
  models = _decoding.Models(
    *[
      checkpoints.Checkpoint(
        config, lowering.weights(config, place), None, (), ""
      )
      for config, place in zip(configs, places)
    ],
    *[None] * (2 - len(configs)),
    places,
  )
  batch, k = _flags.single("batch"), _flags.single("k")
  settings = sampling.settings(
    batch, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p
  )
  prompt = min(FLAGS.context - 1, 1024)
  given = lowering.inputs(batch, prompt, settings, places)
  drafter = _decoding.drafter(models, k)
  steps = lowering.steps(
    models.target_model,
    drafter,
    _decoding.rule(),
    models.params,
    given,
    FLAGS.context,
    places,
  )
  return models, drafter.spec, steps


def compile_step(name: str, steps) -> dict:
  """What the compiled step needs and does, per chip."""
  begin = time.perf_counter()
  made = steps[name]().compile()
  seconds = time.perf_counter() - begin
  text = made.as_text()
  if FLAGS.hlo:
    Path(FLAGS.hlo).mkdir(parents=True, exist_ok=True)
    files.replace_file(Path(FLAGS.hlo) / f"{name}.txt", text)
  program = hlo.Program(text)
  memory = made.memory_analysis()
  # Rows that are behind are rare: a draft model's loop for them is not run.
  unknown = 0.0 if name == "draft" and FLAGS.drafter == "model" else 1.0
  touched = traffic.touches(program, unknown)
  found = traffic.exchanges(program, unknown)
  return {
    "step": name,
    "seconds": seconds,
    "arguments": memory.argument_size_in_bytes,
    "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "flops": (made.cost_analysis() or {}).get("flops", 0.0),
    "read": sum(t.times * t.read for t in touched),
    "written": sum(t.times * t.written for t in touched),
    "collectives": traffic.by_kind(found),
    "exchanges": [one._asdict() for one in found],
  }


def apart(name: str) -> dict:
  """The same, in a process of its own."""
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "step.json"
    command = [
      sys.executable, __file__, *sys.argv[1:],
      f"--steps={name}", "--here", f"--json={path}",
    ]  # fmt: skip
    try:
      done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=FLAGS.patience_seconds,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return {"step": name, "error": f"not in {FLAGS.patience_seconds} s"}
    if done.returncode:
      last = (done.stderr.strip().splitlines() or ["?"])[-1]
      return {"step": name, "error": last[:300]}
    return json.loads(path.read_text())["steps"][0]


def chip():
  """Of the topology."""
  kind = FLAGS.topology.partition(":")[0]
  return chips.get(_CHIPS.get(kind, kind))


def planned(models, spec) -> dict[str, float]:
  """Bytes on each chip of weights, caches and logits."""
  return memory_plan.plan(
    *[*models.configs, None][:2],
    batch=_flags.single("batch"),
    max_length=FLAGS.context,
    num_nodes=spec.max_nodes,
    places=models.places,
  ).parts


def estimated(models, spec) -> dict[str, dict[str, float]]:
  """Bytes of memory, FLOPs and bytes sent of each step by the cost model, on
  each chip."""
  found = {}
  types = {"weights": FLAGS.dtype, "kv": FLAGS.dtype}
  places, batch = models.places, _flags.single("batch")

  def cost(config, place, tokens, **options):
    deployment = Deployment(
      shapes.of_config(config),
      chip(),
      ways=place.ways("query"),
      replicas=place.ways("rows"),
      **types,
      **options,
    )
    return deployment.cost(batch, tokens, FLAGS.context)

  start = FLAGS.exit_layer or 0  # verification goes on where an exit draft ends
  target = models.target.config
  found["verify"] = [cost(target, places.target, spec.max_nodes, start=start)]
  if models.draft and spec.chain:
    draft = models.draft.config, places.draft
    rest = [cost(*draft, 1)] * (spec.max_depth - 1)
    found["draft"] = [cost(*draft, 2), *rest]
  return {
    step: {
      name: sum(getattr(one, name) for one in costs)
      for name in ("bytes", "flops", "sent")
    }
    for step, costs in found.items()
  }


def held(step: dict) -> float:
  """Bytes on each chip while a step runs."""
  return step["arguments"] + step["results"] + step["temporaries"]


def table(steps: list[dict], said: dict[str, dict], memory: float) -> str:
  """Lines for a person."""
  header = ["step", "compiled, s", "arguments", "temporaries", "of memory"]
  header += ["GFLOP", "read", "written", "by the cost model", "collectives"]
  lines = []
  for one in steps:
    if "error" in one:
      lines.append([one["step"], one["error"], *[""] * (len(header) - 2)])
      continue
    needed = held(one)
    moved = one["read"] + one["written"]
    estimated = said.get(one["step"])
    model = ""
    if estimated:
      size = estimated["bytes"]
      model = f"{size / 1e6:.1f} MB ({moved / size:.2f}), "
      model += f"{estimated['flops'] / 1e9:.1f} GFLOP"
    lines.append(
      [
        one["step"],
        f"{one['seconds']:.1f}",
        f"{one['arguments'] / 2**30:.3f} GiB",
        f"{one['temporaries'] / 2**20:.1f} MiB",
        f"{needed / memory:.0%}" + ("" if needed <= memory else ": too much"),
        f"{one['flops'] / 1e9:.1f}",
        f"{one['read'] / 1e6:.1f} MB",
        f"{one['written'] / 1e6:.1f} MB",
        model,
        ", ".join(
          f"{count:g} {kind} {size / 1e3:.4g} KB"
          for kind, (count, size) in one["collectives"].items()
        ),
      ]
    )
  return columns(header, lines)


def compile_tpu() -> None:
  """The whole run."""
  FLAGS.random_weights = True
  FLAGS.compilation_cache = ""  # compilation is timed
  if not FLAGS["dtype"].present:
    FLAGS.dtype = "bfloat16"
  _flags.settle(_OWN)
  unknown = set(FLAGS.steps) - set(lowering.STEPS)
  if unknown:
    raise ValueError(
      f"--steps={','.join(unknown)}; known: {', '.join(lowering.STEPS)}"
    )
  if FLAGS.context < 2:
    raise ValueError(f"--context={FLAGS.context}; it must be >= 2")
  header = _decoding.header(_OWN)
  models, spec, steps = prepared()
  memory_of = chip().memory  # is the chip known?
  found = []
  for name in FLAGS.steps:
    with terminal.progress(f"compiling {name}"):
      found.append(compile_step(name, steps) if FLAGS.here else apart(name))
  said, plan, size = estimated(models, spec), planned(models, spec), memory_of
  parts = ", ".join(f"{n} {x / 2**30:.3f} GiB" for n, x in plan.items())
  terminal.report(f"on each chip, of its {size / 2**30:.0f} GiB: {parts}")
  terminal.report(table(found, said, size))
  for one in found:
    if "error" not in one:
      one["fits"] = held(one) <= size
  if FLAGS.json:
    document = header | {"steps": found, "cost_model": said, "memory": size}
    results.write_json(FLAGS.json, document | {"plan": plan})
  bad = [one["step"] for one in found if not one.get("fits")]
  if bad and not FLAGS.here:
    raise ValueError(f"{', '.join(bad)}: not compiled, or too much for a chip")


main = _main.main_of("compile_tpu", compile_tpu)

if __name__ == "__main__":
  _main.start(main)
