"""The tables of answers: docs/results/README.md's, and README.md's.

A row is a question, the page that says more, and what answers it from results/.
A goal stands beside its figure; one that is missed says so.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from specdec.benchmark import sweeps
from specdec.benchmark.metrics import Estimate
from specdec.report import at_rate, papers
from specdec.report.result_tables import Missing, find, identities
from specdec.report.tables import estimate, markdown, percent, speedup_of

_SPEEDUP = estimate("speed", "speedup")
_TOKENS = estimate("acceptance", "tokens_per_pass")
Of = Callable[[Mapping], str]


class Answer(NamedTuple):
  """A row: `of` takes documents, and may raise Missing, or KeyError where a
  quick run left something out. `first`: it stands in README.md as well."""

  question: str
  page: str
  of: Of
  first: bool = False


def goal(
  number: float | Estimate, bound: float, most: bool = True, form=".2f"
) -> str:
  """Writes a number beside its goal, which is `most`, or least."""
  shown = f"{number:{form}}"
  value = number if isinstance(number, float) else number.value
  met = value <= bound if most else value >= bound
  text = f"{shown} (goal {bound:{form}}"
  return f"{text})" if met else f"**{text}, missed)**"


def _times(document: dict, batch: int, tokens: int) -> Estimate:
  one = find(document["passes"], batch=batch, tokens=tokens)
  return Estimate(**one["times_first"])


def _flatness(target: str, *bounds: float | None) -> Of:
  """T(8) and T(16) over T(1), with and without kernels."""

  def answer(documents: Mapping) -> str:
    texts = []
    for context in (128, 1024):
      name = f"passes_{target}_{context}"
      for n, bound in zip((8, 16), bounds):
        ours, xla = (
          _times(documents[name + kind], 1, n) for kind in ("", "_xla")
        )
        text = f"{ours}" if bound is None else goal(ours, bound)
        texts.append(f"context {context}, {n}: {text}, XLA {xla}")
    return "; ".join(texts)

  return answer


def _roof(documents: Mapping) -> str:
  texts = []
  for target, bound in (("smollm2", 0.88), ("shipped", 0.75)):
    for context in (128, 1024):
      document = documents[f"passes_{target}_{context}"]
      one = find(document["passes"], batch=1, tokens=1)
      read = one["bandwidth_share"]
      text = goal(read["value"], bound, most=False, form=".0%")
      roof = one["roof_seconds"] / one["seconds"]["median"]
      text += f" of the rate read in turns, {roof:.0%} of the best rate read"
      texts.append(f"{target}, context {context}: {text}")
  return "; ".join(texts)


def _rows(documents: Mapping) -> str:
  return goal(_times(documents["passes_smollm2_128"], 4, 4), 1.7)


def _buffers(documents: Mapping) -> str:
  texts = []
  for target in ("smollm2", "shipped"):
    one = find(documents[f"slots_{target}"]["passes"], slots=8192)
    texts.append(f"{target}: {goal(Estimate(**one['times_first']), 1.05)}")
  return "; ".join(texts)


def _mixture(documents: Mapping) -> str:
  document = documents["mixture_batches"]
  runs = document["runs"]
  tokens = at_rate.tokens_of(document["settings"], runs[0]["k"])
  return "; ".join(
    f"batch {run['batch']}: {at_rate.speedup(run, tokens)} times"
    for run in runs
  )


def _best(name: str) -> Of:
  """The fastest k of all prompts together."""

  def answer(documents: Mapping) -> str:
    runs = [x for x in documents[name]["runs"] if x["group"] == "all"]
    best = max(runs, key=speedup_of)
    gain = _SPEEDUP(best)
    verdict = "" if gain.value > 1 else "**no**: "
    if abs(gain.value - 1) < 2 * (gain.error or 0):
      verdict = "no gain beyond the error: "
    return (
      f"{verdict}{gain} times, k = {best['k']} (best of {len(runs)}), "
      f"{_TOKENS(best)} tokens per target step"
    )

  return answer


def _differ(a: Estimate, b: Estimate) -> bool:
  """Whether two figures are more than two standard errors apart."""
  error = math.hypot(a.error or 0, b.error or 0)
  return abs(a.value - b.value) >= 2 * error


def _drafter(documents: Mapping) -> str:
  texts = []
  for temperature in (0.0, 1.0):
    by_name: dict[str, list[dict]] = {}
    for run in documents["drafters"]["runs"]:
      if run["drafter"]["temperature"] == temperature:
        by_name.setdefault(run["drafter"]["name"], []).append(run)
    best = (max(runs, key=speedup_of) for runs in by_name.values())
    ranked = sorted(best, key=speedup_of, reverse=True)[:2]
    shown = (
      f"`{x['drafter']['name']}` {_SPEEDUP(x)} ({x['drafter']['shape']} of "
      f"{x['nodes'] - 1})"
      for x in ranked
    )
    text = f"temperature {temperature:g}: {', then '.join(shown)}"
    if not _differ(*map(_SPEEDUP, ranked)):
      text += ", which cannot be told apart"
    texts.append(text)
  return "; ".join(texts)


def _trees(documents: Mapping) -> str:
  texts = []
  for name in ("shapes_greedy", "shapes_sampled"):
    kinds: dict[bool, list[dict]] = {True: [], False: []}
    for run in documents[name]["runs"]:
      kinds[run["comparison"]["shape"] == "chain"].append(run)
    chain, tree = (max(kinds[x], key=speedup_of) for x in (True, False))
    ours, other = _SPEEDUP(tree), _SPEEDUP(chain)
    verdict = "yes" if ours.value > other.value else "**no**"
    if not _differ(ours, other):
      verdict = "cannot be told apart"
    temperature = documents[name]["settings"]["temperature"]
    texts.append(
      f"temperature {temperature:g}: {verdict}, {ours} with "
      f"{tree['nodes'] - 1} draft tokens (best of {len(kinds[False])} trees), "
      f"a chain {other} with {chain['nodes'] - 1} (best of {len(kinds[True])})"
    )
  return "; ".join(texts)


def _block(documents: Mapping) -> str:
  by_rule: dict[str, list[dict]] = {}
  for run in documents["block"]["runs"]:
    by_rule.setdefault(run["comparison"]["rule"], []).append(run)
  texts, verdicts = [], set()
  for run in by_rule["block"]:
    token = find(by_rule["rejection"], k=run["k"])
    gain, speeds = Estimate(**run["gain"]), (_SPEEDUP(run), _SPEEDUP(token))
    verdict = "block" if gain.value > 1 else "token"
    verdicts.add(verdict if _differ(gain, Estimate(1.0, None)) else "either")
    apart = "" if _differ(*speeds) else ", which cannot be told apart"
    texts.append(
      f"k = {run['k']}: {percent(gain)} tokens per target step, speedup "
      f"{speeds[0]} and {speeds[1]}{apart}"
    )
  verdict = verdicts.pop() if len(verdicts) == 1 else "it depends on k"
  return f"{verdict}; {'; '.join(texts)}"


def _by_kind(name: str, k: int, each: float, mean: float | None = None) -> Of:
  """The speedup of each kind of prompts, and goals of each and of the mean."""

  def answer(documents: Mapping) -> str:
    kinds = {
      run["group"]: _SPEEDUP(run)
      for run in documents[name]["runs"]
      if run["k"] == k and run["group"] != "all"
    }
    if not kinds:
      raise KeyError(k)
    shown = [f"{x} {goal(y, each, most=False)}" for x, y in kinds.items()]
    if mean is not None:
      average = statistics.geometric_mean(x.value for x in kinds.values())
      shown.append(f"geometric mean {goal(average, mean, most=False)}")
    return f"k = {k}: {', '.join(shown)}"

  return answer


def _beams(documents: Mapping) -> str:
  texts = []
  for target in ("smollm2", "shipped"):
    entries = documents[f"beams_{target}"]["beam_searches"]
    gains = (f"{x['width']}: {Estimate(**x['speedup'])}" for x in entries)
    texts.append(f"{target}, by width {', '.join(gains)}")
  return "; ".join(texts)


def _goodput(documents: Mapping) -> str:
  entries = documents["goodput_shipped"]["goodput"]
  points = dict.fromkeys((x["batch"], x["load"]) for x in entries)
  texts = []
  for batch, load in points:
    if load is None:
      ways = [x for x in entries if (x["batch"], x["load"]) == (batch, load)]
      best = max(ways, key=lambda x: x["speedup"]["value"])
      gain = Estimate(**best["speedup"])
      texts.append(f"batch {batch}: {gain} times, {best['name']}")
  return f"all at once, the best of all ways: {'; '.join(texts)}"


def _engines(documents: Mapping) -> str:
  """Our best mean of tokens per second, and that of llama.cpp's 8 bits."""
  engines = documents["engines"]["engines"]
  other = find(engines, name="llama.cpp-Q8_0")
  peers = "llama.cpp", "transformers"
  ours = max(
    (x for x in engines if not x["name"].startswith(peers)),
    key=lambda x: x["mean"]["value"],
  )
  parts = [Estimate(**x["mean"]) for x in (ours, other)]
  share = parts[0].value / parts[1].value
  relative = [(x.error or 0) / x.value for x in parts]
  share = Estimate(share, share * math.hypot(*relative))
  return (
    f"{ours['name']} in float32: {parts[0]} tokens/s, {other['name']}: "
    f"{parts[1]}: {goal(share, 1.0, most=False)} times"
  )


def _band(documents: Mapping) -> str:
  texts = []
  for name in ("sweep_shipped", "sweep_smollm2"):
    # k = 0 is predicted to be 1 whatever is measured.
    lines = [x for x in documents[name]["lines"] if x["run"]["k"]]
    band = sweeps.band(lines)
    share = goal(band.within / band.cells, 0.95, most=False, form=".0%")
    part = re.search(r"--shard=\d+/(\d+)", documents[name]["command"])
    part = f" (one point in {part[1]} of it)" if part else ""
    texts.append(
      f"{band.within} of {band.cells} cells of {name}{part}: {share}"
    )
  return f"within 0.90 to 1.10, k = 0 not counted: {'; '.join(texts)}"


def _formula(documents: Mapping) -> str:
  lines = documents["leviathan"]["lines"]
  ours = sweeps.formula_ratios(lines)
  theirs = [row.measured / row.predicted for row in papers.LEVIATHAN_2]
  return (
    f"a trained encoder-decoder: measured {min(ours):.2f} to {max(ours):.2f} "
    "times what alpha and c predict (T5-XXL in the paper: "
    f"{min(theirs):.2f} to {max(theirs):.2f}), prompt lookup left out; by "
    "calibrated rounds "
    f"{sweeps.band(lines)}"
  )


def _identity(documents: Mapping) -> str:
  texts, same = (sum(x) for x in zip(*identities(documents).values()))
  verdict = "yes" if same == texts else "**no**"
  return (
    f"{verdict}, in {same} of {texts} comparisons with autoregressive decoding "
    "(the same prompts with each k)"
  )


def _tpu(documents: Mapping) -> str:
  big = [
    f"{name}_{chip}"
    for name in ("70b", "mixture", "hybrid", "hybrid_rows")
    for chip in ("v6e", "v5p")
  ]
  texts = []
  for name in ("8b", *big):
    document = documents[f"tpu_{name}"]
    step = find(document["steps"], step="verify")
    moved = step["read"] + step["written"]
    share = moved / document["cost_model"]["verify"]["bytes"]
    settings = document["settings"]
    where = f"{settings['target']}, {settings['batch']} rows"
    where += f" on {settings['topology']}"
    texts.append(f"{where} {share:.2f}")
  return (
    f"bytes of verification over the cost model's: {', '.join(texts)}; "
    "**nothing was run on a TPU**"
  )


def _gpu(documents: Mapping) -> str:
  runs = [
    name
    for name in documents
    if documents[name].get("machine", {}).get("backend") == "gpu"
  ]
  return ", ".join(runs) or "**nothing was decoded on a GPU**"


ANSWERS = (
  Answer("Is the text the model's own?", "correctness", _identity),
  Answer(
    "SmolLM2: what do 8 and 16 tokens a pass cost, times one?",
    *("passes", _flatness("smollm2", 1.2, 1.6)),
    first=True,
  ),
  Answer(
    "The shipped target: the same", "passes", _flatness("shipped", 1.3, None)
  ),
  Answer("How near its roof is a pass of one token?", "passes", _roof),
  Answer("SmolLM2: 4 rows of 4 tokens, times 4 rows of 1", "passes", _rows),
  Answer("64 tokens in 8192 slots, times in 256", "passes", _buffers),
  Answer(
    "What does the shipped pair gain, greedily?",
    *("pair", _best("pair_greedy")),
    first=True,
  ),
  Answer("And at temperature 1?", "pair", _best("pair_sampled")),
  Answer("Which drafter is fastest?", "drafters", _drafter, first=True),
  Answer("Do trees pay?", "rules", _trees, first=True),
  Answer("Block or token verification?", "rules", _block, first=True),
  Answer("Does the paper's formula predict T5?", "t5", _formula),
  Answer(
    "What does drafting gain where prompts come and go?", "goodput", _goodput
  ),
  Answer(
    "And for a mixture, with drafts that cost nothing?", "mixtures", _mixture
  ),
  Answer("Does beam search gain by drafts?", "beam_search", _beams),
  Answer(
    "What does SmolLM2 gain that drafts for itself in int8?",
    *("smollm2", _by_kind("smollm2_quantized", 8, 1.8)),
    first=True,
  ),
  Answer(
    "What does it gain by prompt lookup?",
    *("smollm2", _by_kind("smollm2_lookup", 5, 0.97, 1.35)),
    first=True,
  ),
  Answer("Is that as fast as 8 bits of llama.cpp?", "smollm2", _engines),
  Answer(
    "Does its untrained early exit pay?",
    *("smollm2", _best("smollm2_early_exit")),
  ),
  Answer("Does skipping layers?", "smollm2", _best("smollm2_layer_skip")),
  Answer("Does a trained EAGLE-3?", "smollm2", _best("spec_bench_eagle3")),
  Answer("And behind copies?", "smollm2", _best("spec_bench_copies_eagle3")),
  Answer(
    "What does EAGLE-3 gain, trained on half a million tokens?",
    *("smollm2", _best("spec_bench_same_eagle3")),
  ),
  Answer(
    "What does DSpark gain, trained on the same?",
    "smollm2",
    _best("spec_bench_dspark"),
  ),
  Answer("How good are predictions?", "predictions", _band, first=True),
  Answer("Does it compile well for TPUs?", "tpu", _tpu),
  Answer("And on a GPU?", "tpu", _gpu, first=True),
)


def answers(documents: Mapping) -> str:
  """A line for every question, for docs/results/README.md."""
  return _listed(documents, ANSWERS, "")


def headlines(documents: Mapping) -> str:
  """The first of them, for README.md."""
  return _listed(documents, [x for x in ANSWERS if x.first], "docs/results/")


def _listed(documents: Mapping, rows: Iterable[Answer], folder: str) -> str:
  def answer(row: Answer) -> str:
    try:
      return row.of(documents)
    except Missing as error:
      return error.sentence
    except KeyError as error:
      return f"not in these results: {error}"

  columns = {
    "question": lambda row: f"[{row.question}]({folder}{row.page}.md)",
    "answer": answer,
  }
  return markdown(rows, columns)


TABLES = {"answers": answers, "headlines": headlines}
