"""Lists measurements of what drafters gain on prompts.

The shipped pair, SmolLM2, heads that were trained with equal weights, and
self-drafts at long contexts.
"""

from collections.abc import Iterable

from specdec.benchmark.measurements.measurement import (
  ADAEDL,
  DECIDED,
  HELD_OUT,
  SAMPLED,
  SMOLLM2,
  TEXTS,
  Measurement,
)
from specdec.benchmark.prompts import SOURCES

_MORE = "--prompt_file=configs/prompts/twelve_more.jsonl"
_TEXTS_QUICK = "--limit=1 --max_new_tokens=12 --k=2"
_TRAINED = "train it: docs/training.md"
_SPEC_BENCH, _HUMANEVAL = "runs/spec_bench.jsonl", "runs/humaneval.jsonl"
_DOWNLOADS = (
  (_SPEC_BENCH, SOURCES["spec_bench"]),
  (_HUMANEVAL, SOURCES["humaneval"]),
)
# Trained by configs/train/smollm2_drafter.py on the same tokens; the head
# `smollm2` is its EAGLE-3 of more of them.
_DSPARK, _EAGLE3 = (
  f"runs/smollm2_{kind}/best.safetensors" for kind in ("dspark", "eagle3")
)


def _equal(*folders: str) -> str:
  """Returns flags that compare drafters of configs/train/equal.py, each in a
  folder KIND-SEED."""
  kinds = {"draft": "model", "pard": "pard"}
  drafters = []
  for folder in folders:
    kind = kinds.get(folder.partition("-")[0], "head")
    file = "best" + ".safetensors" * (kind == "head")
    drafters.append(f"{kind}(runs/equal/{folder}/{file})")
  return (
    f"compare_drafters {HELD_OUT} --limit=12 --max_new_tokens=96 "
    f"--k=3,5,7,15 --tree_size=0 --drafters='{'; '.join(drafters)}'"
  )


_ONE_SEED = (
  *("mtp", "peagle", "jetspec", "windowed", "next", "gated", "rnn", "domino"),
  *("selector", "dflash2", "short", "narrow", "wide", "shallow", "deep"),
)
_DFLASH, _DSPARK_0 = (
  f"runs/equal/{kind}-0/best.safetensors" for kind in ("dflash", "dspark")
)
COMPARED = (
  Measurement(
    "pair_greedy",
    "bench --k=1-8 --passes=1",
    2.5,
    "--k=3 --limit=4 --max_new_tokens=32 --repeats=3",
  ),
  Measurement(
    "pair_sampled",
    f"bench {SAMPLED} --k=1,2,3,4,6,8 --passes=1",
    2,
    "--k=3 --limit=4 --max_new_tokens=32 --repeats=3",
  ),
  Measurement(
    "drafters",
    f"compare_drafters {HELD_OUT} --limit=8 --max_new_tokens=96 --k=2,4,8",
    9,
    "--limit=1 --max_new_tokens=16 --k=2 --drafters='lookup; head(eagle)'",
  ),
  Measurement(
    "equal",
    _equal(
      *("draft-0", "pard-0"),
      *(f"{x}-{i}" for x in ("eagle3", "dflash", "dspark") for i in range(3)),
      *(f"{kind}-0" for kind in _ONE_SEED),
    ),
    40,
    needs=((_DFLASH, _TRAINED),),
  ),
  # More seeds, and the weights of positions by D-PACE.
  Measurement(
    "equal_more",
    _equal("draft-1", "draft-2", "mtp-1", "mtp-2", "dpace-0"),
    8,
    needs=(("runs/equal/dpace-0/best.safetensors", _TRAINED),),
  ),
  # What a confidence head is worth: it says how much to draft.
  Measurement(
    "lengths_dspark",
    f"bench {HELD_OUT} --drafter=head({_DSPARK_0}) {SAMPLED} {DECIDED} "
    f"{ADAEDL} --k=1,3,5,7 --batch=1,4 --limit=8 --passes=1 --repeats=8",
    8,
    needs=((_DSPARK_0, _TRAINED),),
  ),
)


def equal_trees() -> Iterable[Measurement]:
  """Trees of heads trained with equal weights: from the slots of one pass,
  alone (dflash) or each given those before it (jetspec), from a Markov head
  (dspark), and level by level (eagle3)."""
  for kind in ("dflash", "jetspec", "dspark", "eagle3"):
    path = f"runs/equal/{kind}-0/best.safetensors"
    yield Measurement(
      f"equal_trees_{kind}",
      f"compare_rules {HELD_OUT} --drafter=head({path}) --limit=6 "
      "--max_new_tokens=96 --only=coupled --sizes=7,15 "
      "--shapes='chain,optimal tree,dynamic tree,wide tree'",
      2.5,
      needs=((path, _TRAINED),),
    )


def long() -> Iterable[Measurement]:
  """Self-drafts at long contexts: of SmolLM2's shape, for time alone, and of
  SmolLM2 that continues pages of ours."""
  ways = (
    ("sparse", "sparse(window=256)"),
    ("quantized", "quantized"),
    ("both", "quantized(window=256)"),
  )
  timed = [(*way, "") for way in ways]
  timed.append(("sparse_int8", "sparse(window=256)", " --kv=int8"))
  for context, minutes in ((4096, 1), (16384, 2), (32768, 2.5)):
    for name, drafter, kv in timed:
      yield Measurement(
        f"long_{context}_{name}",
        "bench --target=preset:smollm2-135m --random_weights --noprefill "
        f"--context={context} --limit=1 --max_new_tokens=64 "
        f"--drafter={drafter} --acceptance=synthetic(0.8) --k=4 --passes=1,5 "
        f"--repeats=5{kv}",
        minutes,
      )
  pages = " ".join(
    f"--prompt_file=docs/{page}.md"
    for page in (
      *("roofline", "training", "measuring", "checkpoints"),
      "results/goodput",
    )
  )
  for name, drafter in ways:
    yield Measurement(
      f"long_pages_{name}",
      f"eval {SMOLLM2} {pages} --max_new_tokens=128 --drafter={drafter} "
      "--k=4,6",
      8,
      apart=True,
    )


def summary() -> Iterable[Measurement]:
  """Every drafter by batch, and prompts that ask for thoughts or are long."""
  shipped = (
    f"compare_drafters {HELD_OUT} --limit=16 --max_new_tokens=64 --tree_size=0 "
    "--k=2,4,8 --drafters='lookup; suffix; recycling; model(stdlib-1m); "
    "early_exit(1); layer_skip(shipped); quantized; head(mtp); head(eagle)'"
  )
  of_smollm2 = (
    "lookup; suffix; recycling; quantized; early_exit(26); head(smollm2); "
    "lookup(k=5) | head(smollm2)"
  )
  smollm2 = (
    f"compare_drafters {SMOLLM2} --chat --prompt_file={{prompts}} --limit=4 "
    f"--max_new_tokens=48 --tree_size=0 --k=4 --drafters='{of_smollm2}'"
  )
  for name, flags, all_minutes in (
    ("shipped", shipped, (4, 4, 5)),
    ("smollm2", smollm2, (4, 5, 9)),
  ):
    for batch, minutes in zip((1, 4, 16), all_minutes):
      name_of = f"summary_{name}_{batch}"
      yield Measurement(name_of, f"{flags} --batch={batch}", minutes)
  for name, drafter in (
    ("lookup", "lookup"),
    ("quantized", "quantized"),
    ("copies_eagle3", "'lookup(k=5) | head(smollm2)'"),
  ):
    yield Measurement(
      f"summary_long_{name}",
      f"eval {SMOLLM2} --chat --prompt_file=configs/prompts/"
      f"long_and_thinking.jsonl --max_new_tokens=128 --drafter={drafter} "
      "--k=3,6",
      3,
    )


def smollm2() -> Iterable[Measurement]:
  """SmolLM2 on four kinds of prompts, by drafter."""
  for name, drafter, ks, minutes in (
    ("quantized", "quantized", "4,6,8,10", 3),
    ("lookup", "lookup(min_ngram=2)", "2,3,5,8", 3),
    ("suffix", "suffix", "5,8", 2),
    ("recycling", "recycling", "2,4", 2),
    ("early_exit", "early_exit(26)", "1,2,4", 2.5),
    ("layer_skip", "layer_skip(attention=[14,17,20,23,26])", "1,2,4", 2.5),
  ):
    yield Measurement(
      f"smollm2_{name}",
      f"eval {TEXTS} --drafter={drafter} --k={ks}",
      minutes,
      None if name == "layer_skip" else _TEXTS_QUICK,
    )
  eagle3 = "head(smollm2)"
  dspark, same_eagle3 = f"head({_DSPARK})", f"head({_EAGLE3})"
  for name, drafter, ks, more in (
    ("lookup", "lookup", "5,8", ""),
    ("suffix", "suffix", "5,8", ""),
    ("quantized", "quantized", "4,6", ""),
    ("eagle3", eagle3, "2,3,5", ""),
    ("eagle3_sampled", eagle3, "2,3", " --temperature=1"),
    ("dspark", dspark, "3,7", ""),
    ("dspark_sampled", dspark, "3,7", " --temperature=1"),
    ("same_eagle3", same_eagle3, "2,3,5", ""),
    ("same_eagle3_sampled", same_eagle3, "2,3", " --temperature=1"),
    ("copies_eagle3", f"'lookup(k=5) | {eagle3}'", "2,3", ""),
    ("copies_dspark", f"'lookup(k=5) | {dspark}'", "3,7", ""),
    ("copies_same_eagle3", f"'lookup(k=5) | {same_eagle3}'", "2,3", ""),
    ("eagle3_int8", "'head(smollm2, weights=int8)'", "2,3,5", ""),
    ("copies_quantized", "'lookup(k=8) | quantized'", "4,8", ""),
    ("suffix_quantized", "'suffix(k=8) | quantized'", "4,8", ""),
  ):
    yield Measurement(
      f"spec_bench_{name}",
      f"eval {SMOLLM2} --chat --prompt_file={_SPEC_BENCH} "
      f"--prompt_file={_HUMANEVAL} --limit=4 --max_new_tokens=128 "
      f"--drafter={drafter} --k={ks}{more}",
      6,
      needs=(
        *_DOWNLOADS,
        *((x, _TRAINED) for x in (_DSPARK, _EAGLE3) if x in drafter),
      ),
    )
  yield Measurement(
    "smollm2_repeated",
    f"repeat_work {TEXTS} {_MORE} --k=8 --max_new_tokens=64",
    3,
    _TEXTS_QUICK,
  )
  gemma = "--prompt_file={prompts} --limit=1 --max_new_tokens=96"
  yield Measurement(
    "gemma_quantized",
    f"eval --target=gemma3-270m {gemma} --drafter=quantized --k=4,6,8",
    4,
  )
  for name, target, draft in (
    ("gemma", "gemma3-270m", "smollm2-135m-instruct"),
    ("smollm2", "smollm2-135m-instruct", "gemma3-270m"),
  ):
    flags = f"--target={target} {gemma} --drafter=translated({draft}) --k=1,3,5"
    for ending, sampled in (
      ("", ""),
      ("_sampled", "--temperature=1 --acceptance=block"),
    ):
      yield Measurement(
        f"translated_{name}{ending}", f"eval {flags} {sampled}", 2
      )
  yield Measurement(
    "engines",
    f"compare_engines {TEXTS} --limit=1 --repeats=3",
    4,
    needs=(("llama_cpp", "pip install llama-cpp-python"),),
  )
