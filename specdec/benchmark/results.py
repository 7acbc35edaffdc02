"""What runs amounted to: the numbers of their tables, JSON and pages.

Invariant: each number is worked out here or in benchmark/metrics.py once, so
that all of them agree. docs/schema.json describes the JSON.
"""

import dataclasses
import json
from collections.abc import Sequence

from specdec.benchmark.metrics import Acceptance, Estimate, Speed
from specdec.utils.files import replace_text
from specdec.utils.terminal import columns


@dataclasses.dataclass(frozen=True)
class Identity:
  """How many texts equal autoregressive decoding's."""

  texts: int
  same: int
  differences: tuple[str, ...] = ()  # a sentence for each of the others

  @property
  def share(self) -> float:
    return self.same / self.texts


@dataclasses.dataclass(frozen=True)
class Run:
  """One setting, decoded speculatively and autoregressively.

  Attributes:
    group: what was decoded: a category of prompts, or 'all'.
    k: levels of a draft at most; of a chain its tokens.
    nodes: tokens that the target verifies in a full round, the pending one
      included.
    identity: None where the texts need not be equal (other noise, same
      distribution; or a rule that is not lossless).
  """

  group: str
  k: int
  nodes: int
  batch: int
  acceptance: Acceptance
  speed: Speed
  identity: Identity | None

  def headline(self) -> list[tuple[str, str]]:
    """The two numbers that matter most."""
    return [
      ("tokens per target pass", str(self.acceptance.tokens_per_pass)),
      ("speedup", f"{self.speed.speedup} x"),
    ]

  def rows(self) -> list[tuple[str, str]]:
    """The summary table: name and value."""
    acceptance, speed = self.acceptance, self.speed
    tokens_per_pass, speedup = self.headline()
    return [
      tokens_per_pass,
      ("accepted up to position", positions(acceptance.prefix_acceptance)),
      ("accepted at position", positions(acceptance.conditional)),
      (
        "drafted, of them wasted",
        f"{acceptance.drafted}, {acceptance.wasted}"
        + (
          f" ({acceptance.wasted / acceptance.drafted:.0%})"
          if acceptance.drafted
          else ""
        ),
      ),
      ("speculative", f"{speed.tokens_per_second:.1f} tokens/s"),
      ("baseline", f"{speed.baseline_tokens_per_second:.1f} tokens/s"),
      speedup,
      ("same text as plain", self.same()),
    ]

  def same(self) -> str:
    """Whether the texts are autoregressive decoding's, in words."""
    if self.identity is None:
      return "not comparable"
    if self.identity.same == self.identity.texts:
      return "yes"
    return "no: " + "; ".join(self.identity.differences[:3])

  def document(self) -> dict:
    """The numbers for JSON."""
    document = dataclasses.asdict(self)
    if self.identity is not None:
      document["identity"]["share"] = self.identity.share
    return document


def positions(estimates: Sequence[Estimate]) -> str:
  """'0.81 0.64 0.50', or '-'."""
  values = ["-" if e.value is None else f"{e.value:.2f}" for e in estimates]
  return " ".join(values) or "-"


def by_group(runs: Sequence[Run]) -> str:
  """A table, a line for every group and k."""
  header = ["group", "texts", "k", "tokens/pass", "accepted/drafted"]
  header += ["baseline tok/s", "tok/s", "speedup", "same text"]
  return columns(
    header,
    [
      [
        run.group,
        str(run.acceptance.texts),
        str(run.k),
        str(run.acceptance.tokens_per_pass),
        str(run.acceptance.accepted_per_drafted),
        f"{run.speed.baseline_tokens_per_second:.1f}",
        f"{run.speed.tokens_per_second:.1f}",
        str(run.speed.speedup),
        f"{run.identity.same}/{run.identity.texts}" if run.identity else "-",
      ]
      for run in runs
    ],
  )


def of_passes(passes: Sequence[dict]) -> str:
  """A table of T(n), from the document of scripts/bench.py."""
  first = {e["batch"]: e["seconds"]["median"] for e in passes[::-1]}
  marks, notes = _warnings(passes)
  header = ["batch x n", "ms", "quartiles", "x first", "GB/s", "GFLOP/s"]
  table = columns(
    [*header, "of the roof"],
    [
      [
        f"{e['batch']} x {e['tokens']}{mark}",
        f"{e['seconds']['median'] * 1e3:.2f}",
        " ".join(f"{q * 1e3:.2f}" for q in e["seconds"]["quartiles"]),
        f"{e['seconds']['median'] / first[e['batch']]:.2f}",
        f"{e['bytes_per_second'] / 1e9:.1f}",
        f"{e['flops_per_second'] / 1e9:.0f}",
        f"{e['roof_seconds'] / e['seconds']['median']:.0%}",
      ]
      for e, mark in zip(passes, marks)
    ],
  )
  return table + notes


def _warnings(entries: Sequence[dict]) -> tuple[list[str], str]:
  """Returns each row's mark, and the footnotes that say what it is for."""
  notes = [x for entry in entries for x in entry["warnings"]]
  return (
    [" *" if entry["warnings"] else "" for entry in entries],
    "".join(f"\n  * warning: {note}" for note in notes),
  )


def of_bench(runs: Sequence[dict]) -> str:
  """A table of runs, from the document of scripts/bench.py."""

  def cells(run: dict, mark: str) -> list[str]:
    speed, acceptance = run["speed"], run["acceptance"]
    identity = run["identity"]
    return [
      f"{run['batch']} x {run['k']}{mark}",
      str(Estimate(**acceptance["tokens_per_pass"])),
      f"{speed['baseline_tokens_per_second']:.1f}",
      f"{speed['tokens_per_second']:.1f}",
      str(Estimate(**speed["speedup"])),
      "-" if identity is None else f"{identity['same']}/{identity['texts']}",
      f"{run['acceptance_seconds']['median'] * 1e3:.2f}",
      f"{run['compile']['seconds']:.1f}",
      f"{run['memory'] / 1e6:,.0f}",
    ]

  header = ["batch x k", "tokens/pass", "baseline tok/s", "tok/s", "speedup"]
  header += ["same text", "accept ms", "compile s", "MB"]
  marks, notes = _warnings(runs)
  return columns(header, list(map(cells, runs, marks))) + notes


# How a draft's draft tokens come about, in a word.
CHILDREN = {
  "none": "drawn",
  "iid": "i.i.d.",
  "without_replacement": "no repeats",
  "deterministic": "likeliest",
}


def of_rules(runs: Sequence[dict]) -> str:
  """A table of scripts/compare_rules.py's runs."""
  header = ["draft tokens", "shape", "children", "rule", "expected", "measured"]
  header += ["over rejection", "tok/s", "speedup", "law"]

  def cells(run):
    comparison = run["comparison"]
    size = run["nodes"] - 1
    distribution = (
      "exact"
      if comparison["lossless"]
      else f"lossy, TV {comparison['distance']:.3f}"
    )
    return [
      str(size),
      comparison["shape"],
      CHILDREN[comparison["siblings"]],
      comparison["rule"],
      str(Estimate(**run["expected"])),
      str(Estimate(**run["acceptance"]["accepted_length"])),
      _percent(Estimate(**run["gain"])),
      f"{run['speed']['tokens_per_second']:.1f}",
      str(Estimate(**run["speed"]["speedup"])),
      distribution,
    ]

  return columns(header, [cells(run) for run in runs])


def _percent(gain: Estimate) -> str:
  """'+3.4 ± 0.2 %'."""
  if gain.value is None:
    return "-"
  error = "" if gain.error is None else f" ± {100 * gain.error:.1f}"
  return f"{100 * (gain.value - 1):+.1f}{error} %"


def write_json(path: str, document: dict) -> None:
  """Writes a document, or fails where it holds what JSON cannot say."""
  text = json.dumps(document, indent=1, allow_nan=False)
  replace_text(path, text + "\n")
