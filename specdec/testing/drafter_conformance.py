"""Checks that a drafter keeps what decoding relies on.

For whoever adds one: `check_drafter` runs it on small batches and raises
AssertionError with a sentence that names it and the invariant that it breaks.
All of it runs on the real loop or on the functions that the loop calls;
expectations come from autoregressive decoding and from enumeration.
"""

import itertools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import acceptance, decode, slots
from specdec.compiled import hlo
from specdec.testing import enumeration
from specdec.testing.books import Broken, check_books, require
from specdec.testing.trial import (
  LENGTH,
  NEVER,
  PROMPT,
  REJECTION,
  ROWS,
  TINY,
  Trial,
  texts_of,
)
from specdec.types import (
  AcceptanceRule,
  Draft,
  Drafter,
  Model,
  Params,
  Stats,
)

INVARIANTS = {
  "trace": "calls of one shape are traced once",
  "coupled": "coupled text is autoregressive text",
  "greedy": "greedy rows are greedy text",
  "eos": "rows end at an EOS or at the limit, and then stay as they are",
  "rows": "a row does not depend on its neighbours",
  "slots": "a row does not depend on who was there before",
  "drawn": "it hands over what its tokens were drawn from",
  "state": "its state is that of the committed text",
  "distribution": "text has the target's distribution",
  "copies": "no cache is copied inside the loop",
}

_ARRIVING = 6  # rows that take the place of others; ROWS / 3 at most
_NEW = 3  # tokens of a text whose distribution is checked
_MOST_DRAFTS = 1100  # enumerated at most
_SMALLEST_P = 1e-5  # of chi-square
_EXACT = 1e-5


def check_drafter(
  make: Drafter | Callable[[], Drafter],
  target: Model,
  params: Params,
  *,
  rules: Sequence[AcceptanceRule] | None = None,
  skip: Collection[str] = (),
  prompts: np.ndarray | None = None,
  draws: int = 2048,
  tolerance: float = 1e-3,
) -> Stats:
  """Checks the INVARIANTS of a drafter, on small batches of one shape.

  Args:
    make: the drafter, or a function without arguments that constructs it; two
      calls must then give one drafter (utils.constructors.cached), or a loop
      that constructs it compiles at every turn.
    target: the model that verifies. The smaller the better: with a vocabulary
      of at most 5 every draft is enumerated, so that a round's distribution is
      checked exactly.
    params: weights of target and drafter.
    rules: whose greedy rows are compared; default all of specdec.acceptance
      that the drafter goes with.
    skip: names of INVARIANTS that do not hold by intention: 'state' where
      drafting learns from refused tokens.
    prompts: [32, 9] token ids; default random ones that repeat themselves.
    draws: texts whose distribution is tested.
    tolerance: of probabilities that two computations of one forward pass give.

  Returns:
    Counts [32] of a generation under the coupled rule: whether drafts were
    accepted, and refused, is for the caller to judge.

  Raises:
    AssertionError: names the drafter and the first invariant that it breaks.
    ValueError: an invariant is unknown.
  """
  unknown = {*skip} - {*INVARIANTS}
  if unknown:
    raise ValueError(
      f"no invariant {', '.join(sorted(unknown))}; they are "
      f"{', '.join(INVARIANTS)}"
    )
  trial = _Checks(make, target, params, rules, prompts)
  trial.draws, trial.tolerance = draws, tolerance
  for name, invariant in INVARIANTS.items():
    try:
      if name not in skip:
        getattr(trial, f"check_{name}")()
    except Broken as broken:
      raise AssertionError(
        f"{trial.drafter.name} breaks {name!r} ({invariant}): {broken.args[0]}"
      ) from None
  return jax.tree.map(np.asarray, trial.coupled.stats)


class _Checks(Trial):
  """The invariants, in the order of the dictionary."""

  def check_trace(self) -> None:
    """Other prompts, lengths, settings and limits are no other program."""
    if not isinstance(self.make, Drafter):
      require(
        self.make() == self.make(),
        "two calls of its constructor give two drafters, and each of them is "
        "compiled; decorate it with specdec.utils.constructors.cached",
      )
    try:
      hash(self.spec)
    except TypeError as error:
      require(False, f"its spec cannot be hashed: {error}")
    self.coupled  # noqa: B018  (traces it)
    traces = self.traces
    length = np.roll(self.inputs["prompt_length"], 1)
    self.run(
      acceptance.coupled(),
      eos=0,
      prompt=(self.prompt + 1) % self.target.vocab_size,
      prompt_length=length,
      temperature=np.full(ROWS, 0.5),
      limit=length + 5,
    )
    require(self.traces == traces, "other prompts were traced once more")

  def check_coupled(self) -> None:
    """Token for token, at every temperature and prompt length."""
    state = self.coupled
    self.same_text(state, range(ROWS), "under the coupled rule")
    try:
      check_books(state, self.inputs["prompt_length"])
    except AssertionError as error:
      require(False, f"origins or counts contradict the text: {error}")
    require(
      self.spec.max_depth == 0 or np.sum(state.stats.drafted) > 0,
      "nothing was drafted, so nothing was checked: give other prompts",
    )

  def check_greedy(self) -> None:
    """Under each rule that goes with the drafter, among sampled rows."""
    cold = np.flatnonzero(self.inputs["temperature"] == 0)
    for rule in self.rules:
      self.same_text(self.run(rule), cold, f"under {rule.name}")

  def same_text(self, state, rows, where: str) -> None:
    """These rows are the baseline's."""
    ours, theirs = texts_of(state), texts_of(self.baseline)
    for row in rows:
      require(
        ours[row] == theirs[row],
        f"row {row} {where} is {ours[row]}, not {theirs[row]}",
      )

  def check_eos(self) -> None:
    """At tokens that are common, with limits at every place of a draft."""
    baseline = texts_of(self.baseline)
    start = self.inputs["prompt_length"]
    new = np.concatenate([t[n:] for t, n in zip(baseline, start)])
    tokens, counts = np.unique(new, return_counts=True)
    limit = np.minimum(start + 1 + np.arange(ROWS) * 7 % 23, LENGTH)
    for eos in tokens[np.argsort(-counts, kind="stable")][:3]:
      state = self.run(acceptance.coupled(), eos=eos, limit=limit)
      for row, text in enumerate(texts_of(state)):
        new = baseline[row][start[row] : limit[row]]
        new = new[: new.index(eos) + 1 if eos in new else None]
        wanted = baseline[row][: start[row]] + new
        require(
          text == wanted,
          f"row {row}, EOS {eos}, limit {limit[row]}: {text}, not {wanted}",
        )
      beyond = np.arange(LENGTH) >= np.asarray(state.length)[:, None]
      beyond &= np.arange(LENGTH) >= PROMPT
      require(
        not np.any(np.asarray(state.tokens)[beyond]),
        "tokens were written behind the end of a row",
      )
    self.check_done_rows(int(eos), limit)

  def check_done_rows(self, eos, limit) -> None:
    """A round changes nothing of a row that was done before it."""
    state = self.start(limit=limit)
    before = _frozen(state)
    while not before["done"].all():
      state = self.go_on(REJECTION, state, eos, 1)
      after, done = _frozen(state), np.flatnonzero(before["done"])
      _require_same(before, done, after, done, "after it was done")
      before = after
    whole, rows = _frozen(self.run(eos=eos, limit=limit)), np.arange(ROWS)
    _require_same(whole, rows, before, rows, "run round by round")

  def check_rows(self) -> None:
    """A row with other neighbours, at another place, and alone."""
    together = _frozen(self.run())
    kept = np.arange(0, ROWS, 3)
    place = (kept + 1) % ROWS
    vocab_size = self.target.vocab_size
    other = {
      "prompt": self.rng.integers(0, vocab_size, self.prompt.shape),
      "prompt_length": self.rng.integers(1, PROMPT, ROWS),
      "temperature": np.full(ROWS, 1.3),
      "top_k": np.full(ROWS, vocab_size),
      "top_p": np.full(ROWS, 0.8),
      "index": 100 + np.arange(ROWS),
      **self.sources(),
    }
    for name, values in other.items():
      values[place] = self.inputs[name][kept]
    moved = _frozen(self.run(**other))
    where = "with other neighbours"
    _require_same(together, kept, moved, place, where, atol=1e-4)
    alone = np.array([4])
    limit = np.where(np.arange(ROWS) == alone, LENGTH, 1)
    single = _frozen(self.run(limit=limit))
    _require_same(together, alone, single, alone, "alone", atol=1e-4)

  def check_slots(self) -> None:
    """Put where other rows were at work: it has the text it had among all."""
    together = _frozen(self.run())
    arriving = np.arange(_ARRIVING)
    place = 3 * arriving + 1  # where they were not before
    state = self.run(rounds=3)
    parts = self.target, self.drafter, REJECTION, self.params
    try:
      state = slots.refill(
        *parts, state, jnp.asarray(place), self.given(arriving)
      )
    except ValueError as error:
      require(False, f"its rows cannot be told apart: {error}")
    state = self.go_on(REJECTION, state)
    where = "in the place of another"
    _require_same(together, arriving, _frozen(state), place, where, atol=1e-4)

  def check_drawn(self) -> None:
    """Tokens are the draws, by their noise, of the distributions given."""
    for rounds in (0, 1, 4):
      when = f"round {rounds + 1}"
      state = self.run(rounds=rounds)
      noise = self.noise()
      draft = self.propose(state, noise)
      require(np.all(draft.count >= 1), "a draft without its root")
      last = np.asarray(state.length)[:, None] - 1
      pending = np.take_along_axis(np.asarray(state.tokens), last, axis=1)
      require(
        np.array_equal(draft.tokens[:, :1], pending),
        f"node 0 is not the pending token in {when}",
      )
      if draft.log_probs is None:
        other = self.propose(state, self.noise())
        require(
          _same_nodes(draft, other, self.spec.max_nodes),
          "it hands over no distribution, and its tokens, parents or count "
          "depend on noise",
        )
        continue
      for node in range(1, self.spec.max_nodes):
        where = f"node {node} in {when}"
        self.check_draw(draft, noise, node, where)
        other = noise.copy()
        other[:, node:] = self.rng.gumbel(size=other[:, node:].shape)
        self.check_past(draft, self.propose(state, other), node, where)

  def check_draw(self, draft, noise, node, where) -> None:
    """Normalised, possible, and the likeliest under the node's noise."""
    used = draft.count > node
    log_probs, tokens = draft.log_probs[used, node], draft.tokens[used, node]
    total = np.exp(log_probs.astype(float)).sum(-1)
    require(
      np.allclose(total, 1.0, atol=self.tolerance),
      f"the distribution of {where} adds up to {total}",
    )
    addresses = [np.full(ROWS, node)]
    if self.spec.siblings == "without_replacement":
      same = draft.parents == draft.parents[:, node, None]
      addresses.append(np.argmax(same, axis=1))  # the first sibling's noise
    scores = (log_probs + noise[np.arange(ROWS), x][used] for x in addresses)
    gaps = [x.max(-1) - x[np.arange(len(x)), tokens] for x in scores]
    require(
      any(np.all(gap < self.tolerance) for gap in gaps),
      f"tokens of {where} are not the likeliest of log_probs + "
      f"context.noise(depth, {node})",
    )

  def check_past(self, draft, again, node, where) -> None:
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
      np.allclose(ours, theirs, atol=self.tolerance),
      f"the distribution of {where} depends on its own noise or on a later "
      "node's",
    )

  def check_state(self) -> None:
    """After rounds it drafts as after a prefill of the committed text."""
    token = int(np.bincount(np.asarray(self.baseline.tokens).ravel()).argmax())
    for when, rounds, eos in (
      ("a round", 1, NEVER),
      ("five rounds", 5, NEVER),
      ("a text that was cut at an EOS", decode.MAX_ROUNDS, token),
    ):
      state = self.run(rounds=rounds, eos=eos)
      fresh = self.start(prompt=state.tokens, prompt_length=state.length)
      noise = self.noise()
      ours, theirs = (self.propose(x, noise) for x in (state, fresh))
      self.same_draft(ours, theirs, when)

  def same_draft(self, ours, theirs, when) -> None:
    """Node by node, as long as earlier nodes hold the same tokens."""
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
        np.allclose(*pair, atol=self.tolerance),
        f"after {when}, {what} of node {node} of row {row}: {pair[0]}; after "
        f"a prefill of the same text {pair[1]}",
      )

  # Distributions.

  def tables(self, text: tuple[int, ...], depth: int) -> list[np.ndarray]:
    """Distributions, as testing.enumeration's, of `depth` tokens after text."""
    vocab_size = self.target.vocab_size
    return [
      self.after(
        [text + more for more in itertools.product(range(vocab_size), repeat=d)]
      ).reshape((vocab_size,) * (d + 1))
      for d in range(depth)
    ]

  def check_distribution(self) -> None:
    """Of one round exactly, if drafts are few; of whole texts by chi-square."""
    size, vocab_size = self.spec.max_nodes, self.target.vocab_size
    drafts = vocab_size ** (size - 1) if self.sampled else 1
    if vocab_size <= TINY and drafts <= _MOST_DRAFTS and size > 1:
      for rounds in (0, 2):
        self.check_one_round(rounds)
    self.check_texts()

  def check_one_round(self, rounds: int) -> None:
    """All rows hold one text; its drafts are forced, a row each."""
    state = self.run(
      rounds=rounds,
      prompt=self.prompt[:1].repeat(ROWS, 0),
      prompt_length=np.full(ROWS, 5),
      index=np.zeros(ROWS),
      **self.alike,
    )
    drafts, count = self.every_draft(state)
    total = drafts.weight.sum()
    require(
      abs(total - 1) < self.tolerance,
      f"the probabilities of all its drafts add up to {total:.6f}: they are "
      "not what its tokens are drawn from",
    )
    tables = self.tables(texts_of(state)[0], self.spec.max_depth + 1)
    exact = enumeration.text_distribution(tables)
    for rule in self.rules:
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

  def every_draft(self, state) -> tuple[enumeration.Drafts, np.ndarray]:
    """Drafts of positive probability of row 0, and their nodes in use."""
    size, vocab_size = self.spec.max_nodes, self.target.vocab_size
    wanted = np.zeros((1, size - 1), int)
    if self.sampled:
      wanted = itertools.product(range(vocab_size), repeat=size - 1)
      wanted = np.array(list(wanted))
    entries: dict = {}
    for first in range(0, len(wanted), ROWS):
      part = wanted[first : first + ROWS]
      tokens = np.zeros((ROWS, size), np.int32)
      tokens[: len(part), 1:] = part
      draft = self.propose(state, self.forcing(tokens))
      for row in range(len(part)):
        count = int(draft.count[row])
        text = draft.tokens[row] * (np.arange(size) < count)
        text[0] = 0  # enumeration's root
        if self.sampled and not np.array_equal(
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

  def forcing(self, tokens: np.ndarray) -> np.ndarray:
    """Noise [ROWS, A, V] by which every node has its token of [ROWS, N].

    Siblings without replacement share noise: earlier ones are given more.
    """
    size, parents = self.spec.max_nodes, self.spec.parents
    shared = parents if self.spec.siblings == "without_replacement" else None
    noise = np.zeros((ROWS, 2 * size, self.target.vocab_size), np.float32)
    for node in range(1, size):
      for other in reversed(range(node, size)):
        if other == node or (shared and parents[other] == parents[node]):
          score = 1000.0 * (size + node - other)
          noise[np.arange(ROWS), node, tokens[:, other]] = score
    return noise

  def check_texts(self) -> None:
    """Chi-square of whole texts under rejection: their first few tokens."""
    prompt_length = 5
    prompt = tuple(self.prompt[0, :prompt_length].tolist())
    exact = {(): 1.0}
    for _ in range(_NEW):
      probs = self.after([prompt + text for text in exact])
      exact = {
        (*text, token): probability * row[token]
        for (text, probability), row in zip(exact.items(), probs)
        for token in np.flatnonzero(row)
      }
    seen = dict.fromkeys(exact, 0)
    calls = -(-self.draws // ROWS)
    for call in range(calls):
      state = self.run(
        prompt=self.prompt[:1].repeat(ROWS, 0),
        prompt_length=np.full(ROWS, prompt_length),
        limit=np.full(ROWS, prompt_length + _NEW),
        index=call * ROWS + np.arange(ROWS),
        **self.alike,
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

  def check_copies(self) -> None:
    """In the optimised program of the loop, caches are written in place."""
    state = jax.eval_shape(self.start)
    caches = jax.tree.leaves((state.target_cache.layers, state.draft_state))
    # XLA copies what has one number a position (the table model) as it likes.
    buffers = [x for x in caches if x.ndim == 4 and x.shape[-1] > 1]
    if not buffers:
      return
    lowered = self.go_on(REJECTION, state, run=decode.run.lower)
    copies = _cache_copies(lowered.compile().as_text(), buffers)
    require(
      not copies,
      f"{len(copies)} copies of what is as large as a cache, as {copies[:1]}; "
      "if it is none, give the models other sizes",
    )


# Operations that make a second buffer of what they are given.
_COPYING = ("copy", "copy-start", "transpose", "concatenate", "pad", "reverse")


def _cache_copies(text: str, buffers) -> list[str]:
  """Instructions in loops of optimised HLO that make another buffer of a
  cache's dimensions, in any order."""
  shapes = {tuple(sorted(buffer.shape)) for buffer in buffers}
  program = hlo.Program(text)
  copies = []
  for instruction, _, times in program.runs({"": 2.0}):
    if times < 2:
      continue
    for one in (instruction, *program.inside(instruction)):
      results = {tuple(sorted(buffer.shape)) for buffer in one.buffers}
      if one.op in _COPYING and results & shapes:
        copies.append(one.line.strip())
  return copies


def _same_nodes(ours: Draft, theirs: Draft, stop: int) -> bool:
  """Whether two drafts have the same nodes before `stop`."""
  used, other = (np.arange(stop) < x.count[:, None] for x in (ours, theirs))
  return np.array_equal(used, other) and all(
    np.array_equal(a[:, :stop][used], b[:, :stop][used])
    for a, b in ((ours.tokens, theirs.tokens), (ours.parents, theirs.parents))
  )


def _frozen(state) -> dict[str, np.ndarray]:
  """Copies of what a row of a state is, whatever the drafter keeps."""
  row = ("tokens", "length", "done", "fault", "origin", "log_probs")
  counts = ("rounds", "drafted", "accepted", "nodes")
  parts = {name: getattr(state, name) for name in (*row, "draft_log_probs")}
  parts |= {name: getattr(state.stats, name) for name in counts}
  return {name: np.array(value) for name, value in parts.items()}


def _require_same(old, rows, new, places, where: str, atol=0.0) -> None:
  """Rows of one `_frozen` state are those at `places` of another."""
  for name in old:
    for row, a, b in zip(rows, old[name][rows], new[name][places]):
      require(
        np.allclose(a, b, rtol=0, atol=atol),
        f"{name} of row {row} {where} is {b}, not {a}",
      )


def _p_value(seen: np.ndarray, probs: np.ndarray) -> float:
  """Of chi-square; cells that expect fewer than 5 are one cell."""
  expected = probs * seen.sum()
  rare = expected < 5
  seen = np.append(seen[~rare], seen[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  chi = np.sum((seen - expected) ** 2 / np.maximum(expected, 1e-9))
  freedom = max(len(expected) - 1, 1)
  return float(jax.scipy.special.gammaincc(freedom / 2, chi / 2))
