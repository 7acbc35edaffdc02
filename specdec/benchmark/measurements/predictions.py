"""Lists predictions and what they are judged by.

Calibrations, sweeps whose points are predicted and timed, the roofline, and
steps that are compiled for TPUs.
"""

from collections.abc import Iterable

from specdec.benchmark.measurements.measurement import (
  PAIR,
  SAMPLED,
  Measurement,
)

_TPU = (("libtpu", "pip install libtpu; it needs no TPU"),)
_8B = "--topology=v5e:2x4 --mesh=model:8 --target=preset:llama3-8b"
PREDICTIONS = (
  Measurement(
    "calibration",
    f"bench {PAIR} --k=2,5,8 --batch=1,3,6 --context=64",
    2,
    "--k=2 --batch=1 --repeats=2 --max_new_tokens=16",
    flag="calibrate",
  ),
  Measurement(
    "sweep_shipped",
    "sweep --sweep=configs/sweeps/shipped.py --shard=0/2",
    17,
    "--sweep=configs/sweeps/quick.py",
  ),
  Measurement("sweep_smollm2", "sweep --sweep=configs/sweeps/smollm2.py", 8),
  Measurement("leviathan", "sweep --sweep=configs/sweeps/leviathan.py", 15),
  Measurement(
    "calibration_t5",
    "bench --target=stdlib-t5-5m --k=2,5,8 --batch=1,3,6 --context=64",
    2,
    flag="calibrate",
  ),
  Measurement("papers", "roofline --papers", 0.1, quick=""),
  Measurement(
    "roofline_v6e",
    "roofline --chip=v6e --ways=8 --target=llama3-70b "
    "--drafter=model(llama3-1b) --batches=1,8,32 --contexts=2048,8192",
    0.1,
    quick="",
  ),
  Measurement(
    "roofline_here",
    "roofline --calibration={results}/calibration.json --target=stdlib-11m "
    f"{PAIR} --prefix_acceptance=0.85,0.7,0.58,0.47,0.4,0.35,0.3,0.26 "
    "--batches=1,2,4,8 --contexts=128 --context=128",
    0.1,
    quick="",
  ),
  Measurement(
    "tpu_8b",
    f"compile_tpu {_8B} --drafter=model(preset:llama3-1b) --batch=1 --k=4 "
    f"{SAMPLED} --steps=draft,verify,accept,loop",
    3,
    "--topology=v5e:2x2 --mesh=model:4 --target=preset:llama3-1b "
    "--drafter=lookup --steps=verify --context=256",
    needs=_TPU,
  ),
)


def heads() -> Iterable[Measurement]:
  """Steps with a published head of an 8 B model, compiled for eight v5e: on
  each of them whole, and shared out."""
  for head, k in (("eagle3", 4), ("dflash", 15)):
    for name, ways in (("", 1), ("_shared", 8)):
      yield Measurement(
        f"tpu_{head}{name}",
        f"compile_tpu {_8B} --drafter=head(preset:{head}) --draft_ways={ways} "
        f"--batch=1 --k={k} {SAMPLED} --steps=draft,verify,loop",
        1.5,
        needs=_TPU,
      )


def slices() -> Iterable[Measurement]:
  """A dense model, a mixture and a hybrid with recurrent layers, each with a
  drafter, compiled for eight v6e and eight v5p; the hybrid also with rows
  enough for its states to count."""
  eagle = "--drafter=head(preset:eagle3)"
  hybrid = f"qwen3-next-80b-a3b {eagle} --num_nodes=32"
  targets = {
    "70b": "llama3-70b --drafter=model(preset:llama3-1b) --batch=8",
    "mixture": f"qwen3-30b-a3b {eagle} --batch=1",
    "hybrid": f"{hybrid} --batch=1",
    "hybrid_rows": f"{hybrid} --batch=32",
  }
  for chip, shape in (("v6e", "2x4"), ("v5p", "2x2x2")):
    for name, target in targets.items():
      yield Measurement(
        f"tpu_{name}_{chip}",
        f"compile_tpu --topology={chip}:{shape} --mesh=model:8 "
        f"--target=preset:{target} --k=4 {SAMPLED} --steps=draft,verify,accept",
        3,
        needs=_TPU,
      )


def training() -> Iterable[Measurement]:
  """A step of training a published head of an 8 B model, compiled for slices
  of sixteen v5e and of eight v6e."""
  for head, chip, flags in (
    ("eagle3", "v5e", "--config.options.accumulate=8"),
    ("eagle3", "v6e", ""),
    ("dflash", "v5e", ""),
    ("dflash", "v6e", ""),
  ):
    shape, rows = ("4x4", 2) if chip == "v5e" else ("2x4", 1)
    yield Measurement(
      f"training_{head}_{chip}",
      f"compile_training --config=configs/train/published.py:{head} "
      f"--config.target=preset:llama3-8b {flags} --topology={chip}:{shape} "
      f"--mesh=data:{rows},model:8",
      6,
      needs=_TPU,
    )
