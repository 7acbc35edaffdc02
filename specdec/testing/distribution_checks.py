"""Checks that text has the target's distribution, whatever the drafter: of one
round by enumeration of its drafts, of whole texts by chi-square.
"""

import itertools

import jax
import numpy as np

from specdec import acceptance
from specdec.testing import enumeration
from specdec.testing.books import require
from specdec.testing.trial import ROWS, TINY, Trial, texts_of

_NEW = 3  # tokens of a text whose distribution is checked
_MOST_DRAFTS = 1100  # enumerated at most
_SMALLEST_P = 1e-5  # of chi-square
_EXACT = 1e-5


def check_distribution(trial: Trial) -> None:
  """Of one round exactly, if drafts are few; of whole texts by chi-square."""
  size, vocab_size = trial.spec.max_nodes, trial.target.vocab_size
  drafts = vocab_size ** (size - 1) if trial.sampled else 1
  if vocab_size <= TINY and drafts <= _MOST_DRAFTS and size > 1:
    for rounds in (0, 2):
      _check_one_round(trial, rounds)
  _check_texts(trial)


def _check_one_round(trial: Trial, rounds: int) -> None:
  """All rows hold one text; its drafts are forced, a row each."""
  state = trial.run(
    rounds=rounds,
    prompt=trial.prompt[:1].repeat(ROWS, 0),
    prompt_length=np.full(ROWS, 5),
    index=np.zeros(ROWS),
    **trial.alike,
  )
  drafts, count = _every_draft(trial, state)
  total = drafts.weight.sum()
  require(
    abs(total - 1) < trial.tolerance,
    f"the probabilities of all its drafts add up to {total:.6f}: they are "
    "not what its tokens are drawn from",
  )
  tables = _tables(trial, texts_of(state)[0], trial.spec.max_depth + 1)
  exact = enumeration.text_distribution(tables)
  for rule in trial.rules:
    if not (rule.lossless and rule.residual) or rule is acceptance.greedy():
      continue
    levels = [0.0] * len(tables)
    for nodes in np.unique(count):
      part = [None if x is None else x[count == nodes] for x in drafts]
      outcome = enumeration.emitted(
        rule, enumeration.Drafts(*part), tables, count=int(nodes)
      )
      for depth, level in enumerate(outcome.emitted):
        levels[depth] = levels[depth] + level
    joint = levels[0]
    for level, table in zip(levels[1:], tables[1:]):
      joint = joint[..., None] * table + level
    error = float(np.abs(joint - exact).max())
    require(
      error < max(_EXACT, abs(total - 1)),
      f"under {rule.name} a text's probability is off by {error:.6f}, by "
      "enumeration of all drafts",
    )


def _tables(
  trial: Trial, text: tuple[int, ...], depth: int
) -> list[np.ndarray]:
  """Distributions, as testing.enumeration's, of `depth` tokens after text."""
  vocab_size = trial.target.vocab_size
  return [
    trial.after(
      [text + more for more in itertools.product(range(vocab_size), repeat=d)]
    ).reshape((vocab_size,) * (d + 1))
    for d in range(depth)
  ]


def _every_draft(trial: Trial, state) -> tuple[enumeration.Drafts, np.ndarray]:
  """Drafts of positive probability of row 0, and their nodes in use."""
  size, vocab_size = trial.spec.max_nodes, trial.target.vocab_size
  wanted = np.zeros((1, size - 1), int)
  if trial.sampled:
    wanted = itertools.product(range(vocab_size), repeat=size - 1)
    wanted = np.array(list(wanted))
  entries: dict = {}
  for first in range(0, len(wanted), ROWS):
    part = wanted[first : first + ROWS]
    tokens = np.zeros((ROWS, size), np.int32)
    tokens[: len(part), 1:] = part
    draft = trial.propose(state, _forcing(trial, tokens))
    for row in range(len(part)):
      count = int(draft.count[row])
      text = draft.tokens[row] * (np.arange(size) < count)
      text[0] = 0  # enumeration's root
      if trial.sampled and not np.array_equal(
        text[1:count], tokens[row, 1:count]
      ):
        continue  # it cannot be drawn
      weight, drawn = 1.0, None
      if draft.log_probs is not None:
        drawn = np.exp(draft.log_probs[row].astype(float))
        weight = np.prod(drawn[np.arange(1, count), text[1:count]])
      entry = weight, text, draft.parents[row], drawn, count
      entries.setdefault((count, *text), entry)
  *drafts, drawn, count = zip(*entries.values())
  drawn = None if drawn[0] is None else np.array(drawn)
  return enumeration.Drafts(*map(np.array, drafts), drawn), np.array(count)


def _forcing(trial: Trial, tokens: np.ndarray) -> np.ndarray:
  """Noise [ROWS, A, V] by which every node has its token of [ROWS, N].

  Siblings without replacement share noise: earlier ones are given more.
  """
  size, parents = trial.spec.max_nodes, trial.spec.parents
  shared = parents if trial.spec.siblings == "without_replacement" else None
  noise = np.zeros((ROWS, 2 * size, trial.target.vocab_size), np.float32)
  for node in range(1, size):
    for other in reversed(range(node, size)):
      if other == node or (shared and parents[other] == parents[node]):
        score = 1000.0 * (size + node - other)
        noise[np.arange(ROWS), node, tokens[:, other]] = score
  return noise


def _check_texts(trial: Trial) -> None:
  """Chi-square of whole texts under rejection: their first few tokens."""
  prompt_length = 5
  prompt = tuple(trial.prompt[0, :prompt_length].tolist())
  exact = {(): 1.0}
  for _ in range(_NEW):
    probs = trial.after([prompt + text for text in exact])
    exact = {
      (*text, token): probability * row[token]
      for (text, probability), row in zip(exact.items(), probs)
      for token in np.flatnonzero(row)
    }
  seen = dict.fromkeys(exact, 0)
  calls = -(-trial.draws // ROWS)
  for call in range(calls):
    state = trial.run(
      prompt=trial.prompt[:1].repeat(ROWS, 0),
      prompt_length=np.full(ROWS, prompt_length),
      limit=np.full(ROWS, prompt_length + _NEW),
      index=call * ROWS + np.arange(ROWS),
      **trial.alike,
    )
    tokens = np.asarray(state.tokens)[:, prompt_length:][:, :_NEW]
    for text in map(tuple, tokens.tolist()):
      require(text in seen, f"{text} was emitted, which is impossible")
      seen[text] += 1
  p = _p_value(np.array([*seen.values()]), np.array([*exact.values()]))
  require(
    p > _SMALLEST_P,
    f"{calls * ROWS} texts under rejection have p = {p:.1e} (chi-square)",
  )


def _p_value(seen: np.ndarray, probs: np.ndarray) -> float:
  """Of chi-square; cells that expect fewer than 5 are one cell."""
  expected = probs * seen.sum()
  rare = expected < 5
  if rare.all():
    raise ValueError(
      f"{seen.sum()} draws of {len(seen)} texts say nothing: raise draws"
    )
  seen = np.append(seen[~rare], seen[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  chi = np.sum((seen - expected) ** 2 / np.maximum(expected, 1e-9))
  freedom = max(len(expected) - 1, 1)
  return float(jax.scipy.special.gammaincc(freedom / 2, chi / 2))
