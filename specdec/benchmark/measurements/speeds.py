"""Lists measurements of time: passes, draft lengths, beams and goodput."""

from collections.abc import Iterable

from specdec.benchmark.measurements.measurement import (
  ADAEDL,
  DECIDED,
  HELD_OUT,
  PAIR,
  SAMPLED,
  SMOLLM2,
  TEXTS,
  Measurement,
)

_PASSES = "--nodecode --passes=1,2,4,8,12,16"
_FEW = "--passes=1,8 --repeats=2"


def passes() -> Iterable[Measurement]:
  """T(n) of two targets, with and without kernels, at two contexts."""
  for target, flags, minutes in (("shipped", "", 0.5), ("smollm2", SMOLLM2, 1)):
    for kernels in ("", "_xla"):
      for context in (128, 1024):
        yield Measurement(
          f"passes_{target}_{context}{kernels}",
          f"bench {flags} {_PASSES} --batch=1,4 --repeats=9 "
          f"--context={context}",
          minutes,
          _FEW if context == 128 else None,
          environment="SPECDEC_KERNELS=off" if kernels else "",
        )
    slots = "--passes=1 --context=64 --slots=256,1024,4096,8192 --repeats=15"
    yield Measurement(
      f"slots_{target}", f"bench {flags} --nodecode {slots}", 0.5, "--repeats=2"
    )


def weights() -> Iterable[Measurement]:
  """T(n) of SmolLM2 with its weights in other types."""
  for weights in ("bfloat16", "int8", "int4", "stored"):
    yield Measurement(
      f"weights_smollm2_{weights}",
      f"bench {SMOLLM2} --weights={weights} {_PASSES} --repeats=9",
      0.5,
      _FEW if weights == "stored" else None,
    )


def lengths() -> Iterable[Measurement]:
  """Fixed k, auto, adaptive and AdaEDL by batch: the pair, SmolLM2's int8,
  copies, of which some rows have many and others none, and priced tables."""
  shipped = f"{PAIR} {SAMPLED} {ADAEDL} --repeats=16"
  copies = "--drafter=lookup --temperature=0.5 --repeats=16"
  smollm2 = f"{SMOLLM2} --drafter=quantized --max_new_tokens=48 {ADAEDL}"
  many = f"{smollm2} --repeats=3"  # one row takes what 64 do, 64 times
  quick = "--batch=2 --limit=2 --max_new_tokens=12 --repeats=2 --k=1,2"
  for target, flags, batches, minutes in (
    ("shipped", shipped, "1,4,16,64", 19),
    ("copies", copies, "1,4,16,64", 10),
    ("smollm2", smollm2, "1,4,16", 32),
    ("smollm2_many", many, "64", 56),
  ):
    yield Measurement(
      f"lengths_{target}",
      f"bench {flags} {DECIDED} --k=1,2,4,8 --batch={batches} --limit=8 "
      "--passes=1",
      minutes,
      None if target.startswith("smollm2") else quick,
      apart=target.startswith("smollm2"),
    )
  yield Measurement(
    "lengths_table",
    "roofline --chip=v6e --ways=1 --target=llama3-8b "
    "--drafter=model(llama3-1b) --batches=1,4,16,64 --context=512 --alpha=0.8 "
    "--lengths=12",
    6,
    "--batches=2 --most=2 --lengths=1",
  )


def beams() -> Iterable[Measurement]:
  """Beam search by width, with trees of a small draft and of the target's own
  weights in int8."""
  yield Measurement(
    "beams_shipped",
    f"beam_search {HELD_OUT} {PAIR} --limit=20 --max_new_tokens=64 "
    "--shape=dynamic(8) --k=3",
    2,
    "--limit=1 --max_new_tokens=6 --widths=1,2 --repeats=1",
  )
  yield Measurement(
    "beams_smollm2",
    f"beam_search {SMOLLM2} --chat --prompt_file={{prompts}} "
    "--drafter=quantized --shape=dynamic(4) --k=2 --max_new_tokens=32 "
    "--limit=4",
    4,
  )


def mixtures() -> Iterable[Measurement]:
  """Experts that passes of a trained mixture touch, and what that means for
  rounds of one with random weights, whose drafts cost nothing."""
  yield Measurement(
    "mixture_experts",
    "count_experts --target=runs/mixture/best",
    2,
    needs=(
      (
        "runs/mixture/best/config.json",
        "python scripts/train.py --config=configs/train/mixture.py "
        "--folder=runs/mixture",
      ),
    ),
  )
  yield Measurement(
    "mixture_batches",
    "bench --target=configs/shapes/mixture --random_weights --noprefill "
    "--context=64 --limit=16 --max_new_tokens=32 --temperature=1 "
    "--drafter=lookup(min_ngram=0) --acceptance=synthetic(0.8) --k=4 "
    "--batch=1,4,16 --passes=1,5 --repeats=5",
    6,
  )


def goodput() -> Iterable[Measurement]:
  """Prompts that arrive and leave, by batch and load."""
  shipped = (
    f"{HELD_OUT} {PAIR} {SAMPLED} {DECIDED} {ADAEDL} --loads=0.9,inf "
    "--max_new_tokens=64 --least_new_tokens=16"
  )
  yield Measurement(
    "goodput_shipped",
    f"goodput {shipped} --k=2,4 --batch=1,4,16 --requests=32",
    7.5,
    "--k=2 --batch=2 --loads=inf --requests=4 --repeats=2 --max_new_tokens=16 "
    "--least_new_tokens=4",
  )
  yield Measurement(
    "goodput_shipped_64",
    f"goodput {shipped} --k=1,2 --batch=64 --requests=192",
    7.5,
  )
  yield Measurement(
    "goodput_smollm2",
    f"goodput {TEXTS} --drafter=quantized {DECIDED} --k=2,4 --batch=1,4 "
    "--loads=0.9,inf --requests=12 --max_new_tokens=32 --least_new_tokens=8",
    18,
    apart=True,
  )
