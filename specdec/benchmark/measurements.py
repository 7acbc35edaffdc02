"""The measurements that docs/results shows: programs with their flags.

To add one, add a line here, and a region to a page that shows it.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.utils.spelling import choices

HELD_OUT = "--prompt_file=specdec/shipped/prompts.jsonl"
FOUR_KINDS = "configs/prompts/four_kinds.jsonl"
_LISTS = "--length", "--prompt_file"  # flags that are given once a value
_FOLDERS = "eval", "repeat_work", "compare_drafters", "compare_rules", "sweep"


class Measurement(NamedTuple):
  """A command, and where its results come from.

  Attributes:
    name: of its file in results/.
    line: a program of scripts/ and its flags, as one types them, but for the
      one that says where results go; {prompts} stands for a file of prompts of
      four kinds, {results} for the folder of all results.
    minutes: about how long it takes on two CPU cores.
    quick: flags of a quick run, which take the place of those of that name;
      None: a quick run leaves it out, as another like it is there.
    flag: the one that says where results go; '': --output, a folder, of the
      programs that write one, else --json.
    environment: NAME=VALUE, by which the command differs from others.
    needs: modules and files without which it cannot run, each with how to get
      it.
    apart: it takes long and runs where it is named, not with all.
  """

  name: str
  line: str
  minutes: float
  quick: str | None = ""
  flag: str = ""
  environment: str = ""
  needs: Sequence[tuple[str, str]] = ()
  apart: bool = False

  @property
  def program(self) -> str:
    """Its name in scripts/."""
    return self.line.partition(" ")[0]

  @property
  def to(self) -> str:
    """The flag that says where results go."""
    return self.flag or ("output" if self.program in _FOLDERS else "json")

  def argv(self, results: Path, prompts: str, quick: bool) -> list[str]:
    """Returns the flags of a run: the last of each name, and all of _LISTS."""
    quick_flags = (quick and self.quick) or ""
    _, *flags = shlex.split(f"{self.line} {quick_flags}")
    names = [flag.partition("=")[0] for flag in flags]
    once = {
      (flag if name in _LISTS else name): flag
      for name, flag in zip(names, flags)
    }
    places = {"{results}": str(results), "{prompts}": prompts}
    pattern = "|".join(map(re.escape, places))
    return [re.sub(pattern, lambda x: places[x[0]], x) for x in once.values()]

  def command(self, argv: Iterable[str]) -> str:
    """Returns what one would type."""
    command = ["python", f"scripts/{self.program}.py", *argv]
    return f"{self.environment} {shlex.join(command)}".strip()

  def missing(self) -> str:
    """Says what it needs and is not there, or nothing."""
    for what, how in self.needs:
      is_module = what.isidentifier() and importlib.util.find_spec(what)
      if not (is_module or Path(what).exists()):
        return f"{what} is not here: {how}"
    return ""


SMOLLM2 = "--target=smollm2-135m-instruct"
_PASSES = "--nodecode --passes=1,2,4,8,12,16"
_FEW = "--passes=1,8 --repeats=2"
_PAIR = "--drafter=model(stdlib-1m)"
_SAMPLED = "--temperature=1 --acceptance=rejection"
_ADAEDL = "--length=entropy(limit=0.4)"  # of drafts with a distribution
_DECIDED = "--length=auto --length=adaptive"
_RULES = f"{HELD_OUT} {_PAIR} --limit=8 --max_new_tokens=96"
_TREES = "--shapes='chain,optimal tree,dynamic tree' --sizes=4,8,16,24"
_RULES_QUICK = "--limit=1 --max_new_tokens=16 --sizes=4"
_TEXTS = f"{SMOLLM2} --chat --prompt_file={{prompts}} --max_new_tokens=128"
_MORE = "--prompt_file=configs/prompts/twelve_more.jsonl"
_TEXTS_QUICK = "--limit=1 --max_new_tokens=12 --k=2"
_TPU = (("libtpu", "pip install libtpu; it needs no TPU"),)
_8B = "--topology=v5e:2x4 --mesh=model:8 --target=preset:llama3-8b"
_TRAINED = "train it: docs/training.md"
_SPEC_BENCH, _HUMANEVAL = "runs/spec_bench.jsonl", "runs/humaneval.jsonl"
_DOWNLOADS = (
  (
    _SPEC_BENCH,
    "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
  ),
  (_HUMANEVAL, "data/HumanEval.jsonl.gz of github.com/openai/human-eval"),
)
# Trained by configs/train/smollm2_drafter.py; `smollm2` is its EAGLE-3.
_DSPARK = "runs/smollm2_dspark/best.safetensors"
# Trained by configs/train/equal.py, with seeds 0 to 2 or 0.
_EQUAL = "; ".join(
  f"{kind}(runs/equal/{name}-{seed}/best{ending})"
  for kind, ending, names, seeds in (
    ("model", "", "draft", 1),
    ("pard", "", "pard", 1),
    ("head", ".safetensors", "eagle3 dflash dspark", 3),
    (
      "head",
      ".safetensors",
      "mtp peagle jetspec windowed next gated rnn domino selector dflash2 "
      "short narrow wide shallow deep",
      1,
    ),
  )
  for name in names.split()
  for seed in range(seeds)
)


def _passes() -> Iterable[Measurement]:
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


def _weights() -> Iterable[Measurement]:
  """T(n) of SmolLM2 with its weights in other types."""
  for weights in ("bfloat16", "int8", "int4", "stored"):
    yield Measurement(
      f"weights_smollm2_{weights}",
      f"bench {SMOLLM2} --weights={weights} {_PASSES} --repeats=9",
      0.5,
      _FEW if weights == "stored" else None,
    )


def _beams() -> Iterable[Measurement]:
  """Beam search by width, with trees of a small draft and of the target's own
  weights in int8."""
  yield Measurement(
    "beams_shipped",
    f"beam_search {HELD_OUT} {_PAIR} --limit=20 --max_new_tokens=64 "
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
    None,
  )


def _lengths() -> Iterable[Measurement]:
  """Fixed k, auto, adaptive and AdaEDL by batch: the pair, SmolLM2's int8,
  copies, of which some rows have many and others none, and priced tables."""
  shipped = f"{_PAIR} {_SAMPLED} {_ADAEDL} --repeats=16"
  copies = "--drafter=lookup --temperature=0.5 --repeats=16"
  smollm2 = f"{SMOLLM2} --drafter=quantized --max_new_tokens=48 {_ADAEDL}"
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
      f"bench {flags} {_DECIDED} --k=1,2,4,8 --batch={batches} --limit=8 "
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


def _goodput() -> Iterable[Measurement]:
  """Prompts that arrive and leave, by batch and load."""
  shipped = (
    f"{HELD_OUT} {_PAIR} {_SAMPLED} {_DECIDED} {_ADAEDL} --loads=0.9,inf "
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
    None,
  )
  yield Measurement(
    "goodput_smollm2",
    f"goodput {_TEXTS} --drafter=quantized {_DECIDED} --k=2,4 --batch=1,4 "
    "--loads=0.9,inf --requests=12 --max_new_tokens=32 --least_new_tokens=8",
    18,
    None,
    apart=True,
  )


def _smollm2() -> Iterable[Measurement]:
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
      f"eval {_TEXTS} --drafter={drafter} --k={ks}",
      minutes,
      None if name == "layer_skip" else _TEXTS_QUICK,
    )
  eagle3, dspark = "head(smollm2)", f"head({_DSPARK})"
  for name, drafter, ks, more in (
    ("lookup", "lookup", "5,8", ""),
    ("suffix", "suffix", "5,8", ""),
    ("quantized", "quantized", "4,6", ""),
    ("eagle3", eagle3, "2,3,5", ""),
    ("eagle3_sampled", eagle3, "2,3", " --temperature=1"),
    ("dspark", dspark, "3,7", ""),
    ("copies_eagle3", f"'lookup(k=5) | {eagle3}'", "2,3", ""),
    ("copies_dspark", f"'lookup(k=5) | {dspark}'", "3,7", ""),
  ):
    yield Measurement(
      f"spec_bench_{name}",
      f"eval {SMOLLM2} --chat --prompt_file={_SPEC_BENCH} "
      f"--prompt_file={_HUMANEVAL} --limit=4 --max_new_tokens=128 "
      f"--drafter={drafter} --k={ks}{more}",
      6,
      None,
      needs=(
        *_DOWNLOADS,
        *([(_DSPARK, _TRAINED)] if dspark in drafter else []),
      ),
    )
  yield Measurement(
    "smollm2_repeated",
    f"repeat_work {_TEXTS} {_MORE} --k=8 --max_new_tokens=64",
    3,
    _TEXTS_QUICK,
  )
  gemma = "--prompt_file={prompts} --limit=1 --max_new_tokens=96"
  yield Measurement(
    "gemma_quantized",
    f"eval --target=gemma3-270m {gemma} --drafter=quantized --k=4,6,8",
    4,
    None,
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
        f"translated_{name}{ending}", f"eval {flags} {sampled}", 2, None
      )
  yield Measurement(
    "engines",
    f"compare_engines {_TEXTS} --limit=1 --repeats=3",
    4,
    None,
    needs=(("llama_cpp", "pip install llama-cpp-python"),),
  )


def _summary() -> Iterable[Measurement]:
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
      yield Measurement(name_of, f"{flags} --batch={batch}", minutes, None)
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
      None,
    )


def _long() -> Iterable[Measurement]:
  """Self-drafts at long contexts: of SmolLM2's shape, for time alone, and of
  SmolLM2 that continues pages of ours."""
  ways = (
    ("sparse", "sparse(window=256)"),
    ("quantized", "quantized"),
    ("both", "quantized(window=256)"),
  )
  for context, minutes in ((4096, 1), (16384, 2), (32768, 2.5)):
    for name, drafter in ways:
      yield Measurement(
        f"long_{context}_{name}",
        "bench --target=preset:smollm2-135m --random_weights --noprefill "
        f"--context={context} --limit=1 --max_new_tokens=64 "
        f"--drafter={drafter} --acceptance=synthetic(0.8) --k=4 --passes=1,5 "
        "--repeats=5",
        minutes,
        None,
      )
  pages = " ".join(
    f"--prompt_file=docs/{page}.md"
    for page in ("roofline", "training", "measuring", "checkpoints")
  )
  for name, drafter in ways:
    yield Measurement(
      f"long_pages_{name}",
      f"eval {SMOLLM2} {pages} --max_new_tokens=128 --drafter={drafter} "
      "--k=4,6",
      5,
      None,
      apart=True,
    )


def _equal_trees() -> Iterable[Measurement]:
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
      None,
      needs=((path, _TRAINED),),
    )


def _heads() -> Iterable[Measurement]:
  """Steps with a published head of an 8 B model, compiled for eight v5e."""
  for head, k in (("eagle3", 4), ("dflash", 15)):
    yield Measurement(
      f"tpu_{head}",
      f"compile_tpu {_8B} --drafter=head(preset:{head}) --batch=1 --k={k} "
      f"{_SAMPLED} --steps=draft,verify,loop",
      1.5,
      None,
      needs=_TPU,
    )


def _training() -> Iterable[Measurement]:
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
      None,
      needs=_TPU,
    )


MEASUREMENTS = (
  *_passes(),
  *_weights(),
  Measurement(
    "pair_greedy",
    "bench --k=1-8 --passes=1",
    2.5,
    "--k=3 --limit=4 --max_new_tokens=32 --repeats=3",
  ),
  Measurement(
    "pair_sampled",
    f"bench {_SAMPLED} --k=1,2,3,4,6,8 --passes=1",
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
    f"compare_drafters {HELD_OUT} --limit=12 --max_new_tokens=96 "
    f"--k=3,5,7,15 --tree_size=0 --drafters='{_EQUAL}'",
    40,
    None,
    needs=(("runs/equal/dflash-0/best.safetensors", _TRAINED),),
  ),
  *_equal_trees(),
  *_long(),
  *_summary(),
  Measurement(
    "rules",
    f"compare_rules {_RULES} --temperature=1 --sizes=8 "
    "--shapes='chain,2 chains,optimal tree'",
    5,
    f"{_RULES_QUICK} --only='rejection; block' --shapes=chain",
  ),
  Measurement("lossy", "compare_rules --tables", 2, None),
  Measurement(
    "block",
    f"compare_rules {_RULES} --temperature=1 --sizes=4,6,8 --shapes=chain "
    "--only='rejection; block' --limit=32",
    2,
    _RULES_QUICK,
  ),
  Measurement(
    "shapes_greedy",
    f"compare_rules {_RULES} --only=coupled {_TREES}",
    4.5,
    f"{_RULES_QUICK} --shapes='chain,dynamic tree'",
  ),
  Measurement(
    "shapes_sampled",
    f"compare_rules {_RULES} --temperature=1 --only=rejection {_TREES}",
    4.5,
    None,
  ),
  *_smollm2(),
  *_lengths(),
  *_beams(),
  *_goodput(),
  Measurement(
    "calibration",
    f"bench {_PAIR} --k=2,5,8 --batch=1,3,6 --context=64",
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
  Measurement(
    "sweep_smollm2", "sweep --sweep=configs/sweeps/smollm2.py", 8, None
  ),
  Measurement(
    "leviathan", "sweep --sweep=configs/sweeps/leviathan.py", 15, None
  ),
  Measurement(
    "calibration_t5",
    "bench --target=stdlib-t5-5m --k=2,5,8 --batch=1,3,6 --context=64",
    2,
    None,
    flag="calibrate",
  ),
  Measurement("papers", "roofline --papers", 0.1),
  Measurement(
    "roofline_v6e",
    "roofline --chip=v6e --ways=8 --target=llama3-70b "
    "--drafter=model(llama3-1b) --batches=1,8,32 --contexts=2048,8192",
    0.1,
  ),
  Measurement(
    "roofline_here",
    "roofline --calibration={results}/calibration.json --target=stdlib-11m "
    f"{_PAIR} --prefix_acceptance=0.85,0.7,0.58,0.47,0.4,0.35,0.3,0.26 "
    "--batches=1,2,4,8 --contexts=128 --context=128",
    0.1,
  ),
  Measurement(
    "tpu_8b",
    f"compile_tpu {_8B} --drafter=model(preset:llama3-1b) --batch=1 --k=4 "
    f"{_SAMPLED} --steps=draft,verify,accept,loop",
    3,
    "--topology=v5e:2x2 --mesh=model:4 --target=preset:llama3-1b "
    "--drafter=lookup --steps=verify --context=256",
    needs=_TPU,
  ),
  Measurement(
    "tpu_70b",
    "compile_tpu --topology=v6e:2x4 --mesh=model:8 --target=preset:llama3-70b "
    "--drafter=model(preset:llama3-1b) --batch=8 --k=4 "
    f"{_SAMPLED} --steps=draft,verify,accept",
    4,
    None,
    needs=_TPU,
  ),
  *_heads(),
  *_training(),
)


def named(names: Iterable[str]) -> list[Measurement]:
  """Returns those of these names, in their usual order; refuses others."""
  valid = [one.name for one in MEASUREMENTS]
  wanted = set(names)
  for name in wanted.difference(valid):
    raise ValueError(f"no measurement is named {name}; {choices(name, valid)}")
  return [one for one in MEASUREMENTS if one.name in wanted]
