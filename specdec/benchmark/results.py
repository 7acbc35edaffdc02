"""What runs amounted to: the numbers of their tables, JSON and pages.

Invariant: each number is worked out here or in benchmark/metrics.py once, so
that all of them agree. docs/schema.json describes the JSON.
"""

import dataclasses
import json
from collections.abc import Sequence

from specdec.benchmark.metrics import Acceptance, Estimate, Speed
from specdec.utils.files import replace_text


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
    """Returns the two numbers that matter most."""
    return [
      ("tokens per target step", str(self.acceptance.tokens_per_pass)),
      ("speedup", f"{self.speed.speedup:.2f x}"),
    ]

  def rows(self) -> list[tuple[str, str]]:
    """Returns the summary table: name and value."""
    acceptance, speed, identity = self.acceptance, self.speed, self.identity
    tokens_per_pass, speedup = self.headline()
    drafted = f"{acceptance.drafted}, {acceptance.wasted}"
    if acceptance.drafted:
      drafted += f" ({acceptance.wasted / acceptance.drafted:.0%})"
    same = "yes"
    if identity is None:
      same = "not comparable"
    elif identity.same < identity.texts:
      same = "no: " + "; ".join(identity.differences[:3])
    counts, passes = acceptance.speculative_decoding, acceptance.target_passes
    length = f"{acceptance.drafted / passes:.2f}"
    if counts.num_spec_steps < passes:
      length += f" (none in {1 - counts.num_spec_steps / passes:.0%} of rounds)"
    return [
      tokens_per_pass,
      ("mean acceptance length", acceptance_length(acceptance)),
      ("accepted up to position", _by_position(acceptance.prefix_acceptance)),
      ("accepted at position", _by_position(acceptance.conditional)),
      ("draft tokens a round", length),
      ("drafted, of them wasted", drafted),
      ("speculative", f"{speed.tokens_per_second:.1f} tokens/s"),
      ("baseline", f"{speed.baseline_tokens_per_second:.1f} tokens/s"),
      speedup,
      ("same text as the baseline", same),
    ]

  def document(self) -> dict:
    """Returns the numbers for JSON."""
    document = dataclasses.asdict(self)
    if self.identity is not None:
      document["identity"]["share"] = self.identity.share
    return document


def acceptance_length(acceptance: Acceptance) -> str:
  """'3.21 (74% of draft tokens)', by vLLM's definitions; '-' where nothing was
  drafted."""
  counts = acceptance.speculative_decoding
  if counts.mean_acceptance_length is None:
    return "-"
  share = counts.draft_acceptance_rate
  return f"{counts.mean_acceptance_length:.2f} ({share:.0%} of draft tokens)"


def _by_position(estimates: Sequence[Estimate]) -> str:
  values = ["-" if e.value is None else f"{e.value:.2f}" for e in estimates]
  return " ".join(values) or "-"


def write_json(path: str, document: dict) -> None:
  """Writes a document, or fails where it holds what JSON cannot say."""
  text = json.dumps(document, indent=1, allow_nan=False)
  replace_text(path, text + "\n")
