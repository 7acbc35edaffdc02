"""Checks drafts: what their tokens are drawn from, and that they follow from
the committed text alone.
"""

import numpy as np

from specdec import decode
from specdec.testing.books import require
from specdec.testing.trial import NEVER, ROWS, Trial
from specdec.types import Draft


def check_drawn(trial: Trial) -> None:
  """Tokens are the draws, by their noise, of the distributions given."""
  for rounds in (0, 1, 4):
    when = f"round {rounds + 1}"
    state = trial.run(rounds=rounds)
    noise = trial.noise()
    draft = trial.propose(state, noise)
    require(np.all(draft.count >= 1), "a draft without its root")
    last = np.asarray(state.length)[:, None] - 1
    pending = np.take_along_axis(np.asarray(state.tokens), last, axis=1)
    require(
      np.array_equal(draft.tokens[:, :1], pending),
      f"node 0 is not the pending token in {when}",
    )
    if draft.log_probs is None:
      other = trial.propose(state, trial.noise())
      require(
        _same_nodes(draft, other, trial.spec.max_nodes),
        "it hands over no distribution, and its tokens, parents or count "
        "depend on noise",
      )
      continue
    for node in range(1, trial.spec.max_nodes):
      where = f"node {node} in {when}"
      _check_draw(trial, draft, noise, node, where)
      other = noise.copy()
      other[:, node:] = trial.rng.gumbel(size=other[:, node:].shape)
      _check_past(trial, draft, trial.propose(state, other), node, where)


def _check_draw(trial: Trial, draft, noise, node, where) -> None:
  """Normalised, possible, and the likeliest under the node's noise."""
  used = draft.count > node
  log_probs, tokens = draft.log_probs[used, node], draft.tokens[used, node]
  total = np.exp(log_probs.astype(float)).sum(-1)
  require(
    np.allclose(total, 1.0, atol=trial.tolerance),
    f"the distribution of {where} adds up to {total}",
  )
  addresses = [np.full(ROWS, node)]
  if trial.spec.siblings == "without_replacement":
    same = draft.parents == draft.parents[:, node, None]
    addresses.append(np.argmax(same, axis=1))  # the first sibling's noise
  scores = (log_probs + noise[np.arange(ROWS), x][used] for x in addresses)
  gaps = [x.max(-1) - x[np.arange(len(x)), tokens] for x in scores]
  require(
    any(np.all(gap < trial.tolerance) for gap in gaps),
    f"tokens of {where} are not the likeliest of log_probs + "
    f"context.noise(depth, {node})",
  )


def _check_past(trial: Trial, draft, again, node, where) -> None:
  """What comes before a node decides its distribution and whether it is
  drafted: neither its own noise nor a later node's, other in `again`."""
  used = draft.count > node
  require(
    np.array_equal(used, again.count > node),
    f"whether {where} is drafted depends on its token or on a later one; a "
    "token that ends a draft must be verified too",
  )
  require(
    _same_nodes(draft, again, node),
    f"nodes before {where} depend on its noise or on a later node's",
  )
  ours, theirs = (np.exp(x.log_probs[used, node]) for x in (draft, again))
  require(
    np.allclose(ours, theirs, atol=trial.tolerance),
    f"the distribution of {where} depends on its own noise or on a later "
    "node's",
  )


def check_state(trial: Trial) -> None:
  """After rounds it drafts as after a prefill of the committed text."""
  token = int(np.bincount(np.asarray(trial.baseline.tokens).ravel()).argmax())
  for when, rounds, eos in (
    ("a round", 1, NEVER),
    ("five rounds", 5, NEVER),
    ("a text that was cut at an EOS", decode.MAX_ROUNDS, token),
  ):
    state = trial.run(rounds=rounds, eos=eos)
    fresh = trial.start(prompt=state.tokens, prompt_length=state.length)
    noise = trial.noise()
    ours, theirs = (trial.propose(x, noise) for x in (state, fresh))
    _same_draft(trial, ours, theirs, when)


def _same_draft(trial: Trial, ours, theirs, when) -> None:
  """Node by node, as long as earlier nodes hold the same tokens; how many there
  are may depend on rounds before."""
  what = "token, parent" if ours.log_probs is None else "distribution"
  count = np.minimum(ours.count, theirs.count)
  for row, node in ((r, n) for r in range(ROWS) for n in range(1, count[r])):
    nodes = slice(1, node)
    if not all(
      np.array_equal(a[row, nodes], b[row, nodes])
      for a, b in zip(ours[:2], theirs[:2])
    ):
      continue
    pair = [
      (x.tokens[row, node], x.parents[row, node])
      if x.log_probs is None
      else np.exp(x.log_probs[row, node])
      for x in (ours, theirs)
    ]
    require(
      np.allclose(*pair, atol=trial.tolerance),
      f"after {when}, {what} of node {node} of row {row}: {pair[0]}; after "
      f"a prefill of the same text {pair[1]}",
    )


def _same_nodes(ours: Draft, theirs: Draft, stop: int) -> bool:
  """Whether two drafts have the same nodes before `stop`."""
  used, other = (np.arange(stop) < x.count[:, None] for x in (ours, theirs))
  return np.array_equal(used, other) and all(
    np.array_equal(a[:, :stop][used], b[:, :stop][used])
    for a, b in ((ours.tokens, theirs.tokens), (ours.parents, theirs.parents))
  )
