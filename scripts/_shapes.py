"""--shape: how the draft tokens of a round hang together."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdec import draft_shape, draft_tree

MOST = 4096  # tokens of a draft: what sees what is a table of their square
HELP = (
  "chain: k tokens in a row. chains:C: C chains of k tokens; chains:C:S: they "
  "share the first S. optimal:N: the static tree of N draft tokens, at most k "
  "deep, "
  "that keeps most if a node's children are kept with --rank_acceptance. "
  "dynamic:N or dynamic:N:TOP: EAGLE-2's tree, k deep; of the TOP (4) "
  "likeliest continuations of the TOP likeliest prefixes of each level the N "
  "likeliest. FILE.json: paths of a static tree, [[0], [1], [0, 0], ...], each "
  "the child to take at every step, from 0. Lookup drafts chains only."
)


def parse(
  text: str,
  k: int,
  siblings: str | None = None,
  usual: str = "without_replacement",
  rank_acceptance: Sequence[float] = (),
) -> draft_shape.DraftShape | None:
  """The shape; None for a chain, which drafters have built in.

  Args:
    text: as --help says.
    k: levels.
    siblings: one of draft_shape.KINDS; None: deterministic where the tree is
      dynamic, else `usual`.
    rank_acceptance: by rank, for 'optimal'.

  Raises:
    ValueError: it says no shape.
  """
  name, *given = text.split(":")
  if name == "chain" and not given:
    return None
  if Path(text).suffix == ".json":
    paths = _read(text)
    if len(paths) > MOST or max(map(len, paths), default=0) > MOST:
      raise ValueError(f"{text} holds more than {MOST:,} paths or levels")
    if not paths:
      raise ValueError(
        f"{text} holds no path: autoregressive decoding is --k=0"
      )
    return draft_shape.static(draft_tree.from_paths(paths), siblings or usual)
  try:
    numbers = [int(number) for number in given]
    least, most = {"chains": (1, 2), "optimal": (1, 1), "dynamic": (1, 2)}[name]
    if not least <= len(numbers) <= most:
      raise KeyError
    if max(numbers) * (k if name == "chains" else 1) > MOST:
      raise ValueError
  except (ValueError, KeyError):
    raise ValueError(
      f"--shape={text}; accepted: chain, chains:C, chains:C:S, optimal:N, "
      "dynamic:N, dynamic:N:TOP, or a file of paths that ends in .json, of at "
      f"most {MOST:,} tokens"
    ) from None
  if k < 1:
    raise ValueError(f"--shape={text} needs --k >= 1, the levels of the tree")
  if name == "dynamic":
    size, top = [*numbers, 4][:2]
    return draft_shape.dynamic(top, k, size, siblings or "deterministic")
  if name == "chains":
    chains, shared = [*numbers, 0][:2]
    parents = draft_tree.parallel(chains, k, shared)
  else:
    if not rank_acceptance:
      raise ValueError(
        "--shape=optimal needs --rank_acceptance: how often a node's first, "
        "second ... child is kept (scripts/compare_rules.py measures it)"
      )
    by_depth = np.tile(np.asarray(rank_acceptance, float), (k, 1))
    parents = draft_tree.from_paths(draft_tree.optimal(by_depth, *numbers))
  return draft_shape.static(parents, siblings or usual)


def _read(path: str) -> list:
  try:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
  except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f"{path} is not JSON ({error})") from None
  if not (
    isinstance(found, list)
    and all(
      isinstance(x, list) and all(isinstance(i, int) for i in x) for x in found
    )
  ):
    raise ValueError(f"{path} must hold a list of paths: [[0], [1], [0, 0]]")
  return found
