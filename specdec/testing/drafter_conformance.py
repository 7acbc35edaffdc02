"""Checks that a drafter keeps what decoding relies on.

For whoever adds one: `check_drafter` runs it on small batches and raises
AssertionError with a sentence that names it and the invariant that it breaks.
Everything is checked on the real loop or on the functions that the loop calls;
expectations come from autoregressive decoding and from enumeration.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import acceptance, decode, sampling, step
from specdec.compiled import hlo
from specdec.testing import enumeration
from specdec.testing.books import Broken, check_books, require
from specdec.types import (
  AcceptanceRule,
  Array,
  DecodeState,
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
  "drawn": "it hands over what its tokens were drawn from",
  "state": "its state is that of the committed text",
  "distribution": "text has the target's distribution",
  "copies": "no cache is copied inside the loop",
}

ROWS = 32  # of every batch
LENGTH = 28  # prompt and output
_PROMPT = 9  # tokens of the longest prompt
_NEVER = -1  # no token has this id
_NEW = 3  # tokens of a text whose distribution is checked
_TINY = 5  # vocabulary whose texts are enumerated
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
  drafter = make if isinstance(make, Drafter) else make()
  trial = _Trial(drafter, target, params, prompts, draws, tolerance)
  checks = {
    "trace": lambda: trial.check_traces(make),
    "greedy": lambda: trial.check_greedy(rules),
    "distribution": lambda: trial.check_distribution(rules),
  }
  for name, invariant in INVARIANTS.items():
    if name in skip:
      continue
    try:
      checks.get(name, getattr(trial, f"check_{name}", None))()
    except Broken as broken:
      raise AssertionError(
        f"{drafter.name} breaks {name!r} ({invariant}): {broken.args[0]}"
      ) from None
  return jax.tree.map(np.asarray, trial.coupled.stats)


class _Noise:
  """Context.noise that is an array [B, A, V]: node n's is noise[:, n]."""

  def __init__(self, noise: Array):
    self.noise = noise

  def __call__(self, depth, node) -> Array:
    del depth
    last = self.noise.shape[1] - 1
    return jnp.take(self.noise, jnp.minimum(node, last), axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(target, drafter, params, state: DecodeState, noise: Array):
  """The draft of a state under given noise [B, A, V], its tree in place."""
  context = step.context_of(state, target.vocab_size, acceptance.coupled())
  context = context._replace(noise=_Noise(noise))
  draft, _ = drafter.propose(params, state.draft_state, context)
  return drafter.spec.with_tree(draft)._replace(resume=None)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs_after(target, params, tokens, length, settings):
  """[B, V] warped log-probabilities of the token that follows each text."""
  cache = target.init_cache(*tokens.shape)
  output, _ = target.apply(params, tokens, cache)
  logits = output.logits[jnp.arange(len(tokens)), length - 1]
  return sampling.warp(logits, settings)


class _Trial:
  """A drafter with its target, and batches of one shape to run them on."""

  def __init__(self, drafter, target, params, prompts, draws, tolerance):
    self.traces = 0

    def propose(*args):
      self.traces += 1
      return drafter.propose(*args)

    self.drafter = drafter._replace(propose=propose)
    self.spec, self.target = drafter.spec, target
    self.params = jax.tree.map(jnp.asarray, params)
    self.draws, self.tolerance = draws, tolerance
    self.rng = np.random.default_rng(0)
    vocab_size = target.vocab_size
    if prompts is None:
      prompts = self.rng.integers(0, vocab_size, (ROWS, _PROMPT))
      prompts[:, 4:] = prompts[:, :5]  # something to look up
    self.prompt = np.zeros((ROWS, LENGTH), np.int32)
    self.prompt[:, :_PROMPT] = prompts
    row = np.arange(ROWS)
    self.inputs = {
      "prompt": self.prompt,
      "prompt_length": np.array([1, _PROMPT, 5, 2, 8, 3])[row % 6],
      "temperature": np.array([1.0, 0.0, 0.7, 1.0])[row % 4],
      "top_k": np.where(row % 4 == 3, min(3, vocab_size), vocab_size),
      "top_p": np.where(row % 4 == 2, 0.9, 1.0),
      "limit": np.full(ROWS, LENGTH),
      "index": row,
    }

  def start(self, drafter=None, **changes) -> DecodeState:
    """The state after prefill; `changes` of self.inputs."""
    inputs = self.inputs | changes
    return decode.start(
      self.target,
      drafter or self.drafter,
      decode.NO_DRAFT_RULE if drafter else acceptance.coupled(),
      self.params,
      jnp.asarray(inputs["prompt"], jnp.int32),
      jnp.asarray(inputs["prompt_length"], jnp.int32),
      jax.random.key(0),
      max_length=LENGTH,
      sampling=sampling.settings(
        ROWS, inputs["temperature"], inputs["top_k"], inputs["top_p"]
      ),
      limit=jnp.asarray(inputs["limit"], jnp.int32),
      index=jnp.asarray(inputs["index"], jnp.int32),
    )

  def go_on(self, rule, state, eos=_NEVER, rounds=decode.MAX_ROUNDS):
    """Runs rounds; `state` is donated."""
    return decode.run(
      self.target,
      self.drafter,
      rule,
      self.params,
      state,
      jnp.array([eos], jnp.int32),
      jnp.int32(rounds),
    )

  def run(self, rule, *, eos=_NEVER, rounds=decode.MAX_ROUNDS, **changes):
    """A state after rounds of the drafter."""
    return self.go_on(rule, self.start(**changes), eos, rounds)

  @functools.cached_property
  def baseline(self) -> DecodeState:
    """Autoregressive decoding of the same inputs."""
    return decode.run(
      self.target,
      decode.NO_DRAFTER,
      decode.NO_DRAFT_RULE,
      self.params,
      self.start(decode.NO_DRAFTER),
      jnp.array([_NEVER], jnp.int32),
      jnp.int32(decode.MAX_ROUNDS),
    )

  @functools.cached_property
  def coupled(self) -> DecodeState:
    """Speculative decoding of them under the coupled rule."""
    return self.run(acceptance.coupled())

  def fits(self, rule: AcceptanceRule) -> bool:
    """Whether a rule is right for these drafts."""
    chain = self.spec.chain or not rule.chains_only
    return chain and self.spec.siblings in rule.siblings

  # The invariants, in the order of the dictionary.

  def check_traces(self, make) -> None:
    """Other prompts, lengths, settings and limits are no other program."""
    if not isinstance(make, Drafter):
      require(
        make() == make(),
        "two calls of its constructor give two drafters, and each of them is "
        "compiled; decorate it with specdec.utils.constructors.cached",
      )
    try:
      hash(self.spec)
    except TypeError as error:
      require(False, f"its spec cannot be hashed: {error}")
    self.run(acceptance.coupled())
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

  def check_greedy(self, rules) -> None:
    """Under each rule that the drafter goes with, beside sampled rows."""
    if rules is None:
      rules = [rule for rule in every_rule() if self.fits(rule)]
    cold = np.flatnonzero(self.inputs["temperature"] == 0)
    for rule in rules:
      self.same_text(self.run(rule), cold, f"under {rule.name}")

  def same_text(self, state, rows, where: str) -> None:
    """These rows are the baseline's."""
    ours, theirs = _texts(state), _texts(self.baseline)
    for row in rows:
      require(
        ours[row] == theirs[row],
        f"row {row} {where} is {ours[row]}, not {theirs[row]}",
      )

  def check_eos(self) -> None:
    """At tokens that are common, with limits at every place of a draft."""
    baseline = _texts(self.baseline)
    start = self.inputs["prompt_length"]
    new = np.concatenate([t[n:] for t, n in zip(baseline, start)])
    tokens, counts = np.unique(new, return_counts=True)
    limit = np.minimum(start + 1 + np.arange(ROWS) * 7 % 23, LENGTH)
    for eos in tokens[np.argsort(-counts, kind="stable")][:3]:
      state = self.run(acceptance.coupled(), eos=eos, limit=limit)
      for row, text in enumerate(_texts(state)):
        wanted = _cut(baseline[row][: limit[row]], start[row], eos)
        require(
          text == wanted,
          f"row {row}, EOS {eos}, limit {limit[row]}: {text}, not {wanted}",
        )
      beyond = np.arange(LENGTH) >= np.asarray(state.length)[:, None]
      beyond &= np.arange(LENGTH) >= _PROMPT
      require(
        not np.any(np.asarray(state.tokens)[beyond]),
        "tokens were written behind the end of a row",
      )
    self.check_done_rows(int(eos), limit)

  def check_done_rows(self, eos, limit) -> None:
    """A round changes nothing of a row that was done before it."""
    rule = acceptance.rejection()
    state = self.start(limit=limit)
    before = _frozen(state)
    while not before["done"].all():
      state = self.go_on(rule, state, eos, 1)
      after = _frozen(state)
      for name, old in before.items():
        require(
          np.array_equal(old[before["done"]], after[name][before["done"]]),
          f"{name} of a row that was done went on changing",
        )
      before = after
    whole = _frozen(self.run(rule, eos=eos, limit=limit))
    for name, value in whole.items():
      require(
        np.array_equal(value, before[name]),
        f"{name} differs where the host looks at every round",
      )

  def check_rows(self) -> None:
    """A row with other neighbours, at another place, and alone."""
    rule = acceptance.rejection()
    names = ("prompt", "prompt_length", "temperature", "top_k", "top_p")
    together = _frozen(self.run(rule))
    kept = np.arange(0, ROWS, 3)
    place = (kept + 1) % ROWS
    other = {
      "prompt": self.rng.integers(0, self.target.vocab_size, self.prompt.shape),
      "prompt_length": self.rng.integers(1, _PROMPT, ROWS),
      "temperature": np.full(ROWS, 1.3),
      "top_k": np.full(ROWS, self.target.vocab_size),
      "top_p": np.full(ROWS, 0.8),
      "index": 100 + np.arange(ROWS),
    }
    for name in (*names, "index"):
      other[name][place] = self.inputs[name][kept]
    moved = _frozen(self.run(rule, **other))
    self.same_rows(together, kept, moved, place, "with other neighbours")
    alone = np.array([4])
    limit = np.where(np.arange(ROWS) == alone, LENGTH, 1)
    single = _frozen(self.run(rule, limit=limit))
    self.same_rows(together, alone, single, alone, "alone")

  def same_rows(self, old, rows, new, places, where: str) -> None:
    for name in old:
      for row, place in zip(rows, places):
        a, b = old[name][row], new[name][place]
        if np.issubdtype(a.dtype, np.floating):
          same = np.allclose(a, b, atol=1e-4)
        else:
          same = np.array_equal(a, b)
        require(same, f"{name} of row {row} {where} is {b}, not {a}")

  def states(self):
    """(which round is next, state) at the start and in the middle of texts."""
    rule = acceptance.rejection()
    yield "the first round", self.start()
    for rounds in (1, 4):
      yield f"round {rounds + 1}", self.run(rule, rounds=rounds)

  def noise(self) -> np.ndarray:
    """Gumbel noise [ROWS, A, V] of all addresses of a draft."""
    shape = (ROWS, 2 * self.spec.max_nodes, self.target.vocab_size)
    return self.rng.gumbel(size=shape).astype(np.float32)

  def propose(self, state, noise) -> Draft:
    """A draft on the host; parents are [ROWS, N]."""
    draft = _propose(
      self.target, self.drafter, self.params, state, jnp.asarray(noise)
    )
    draft = jax.tree.map(np.asarray, draft)
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)
    return draft._replace(parents=parents)

  def check_drawn(self) -> None:
    """Tokens are the draws, by their noise, of the distributions given."""
    for when, state in self.states():
      noise = self.noise()
      draft = self.propose(state, noise)
      in_use = np.arange(self.spec.max_nodes) < draft.count[:, None]
      require(np.all(draft.count >= 1), "a draft without its root")
      pending = np.asarray(state.tokens)[
        np.arange(ROWS), np.asarray(state.length) - 1
      ]
      require(
        np.array_equal(draft.tokens[:, 0], pending),
        f"node 0 is not the pending token in {when}",
      )
      if draft.log_probs is None:
        other = self.propose(state, self.noise())
        for name in ("tokens", "parents", "count"):
          ours, theirs = getattr(draft, name), getattr(other, name)
          if name != "count":
            ours, theirs = ours[in_use], theirs[in_use]
          require(
            np.array_equal(ours, theirs),
            f"it hands over no distribution, and its {name} depend on noise",
          )
        continue
      self.check_draws(draft, noise, in_use, when)
      for node in range(1, self.spec.max_nodes):
        self.check_past(state, draft, noise, in_use, node, when)

  def check_draws(self, draft, noise, in_use, when) -> None:
    """Normalised, possible, and the likeliest under the node's noise."""
    for node in range(1, self.spec.max_nodes):
      used = in_use[:, node]
      log_probs = draft.log_probs[used, node]
      tokens = draft.tokens[used, node]
      rows = np.arange(len(tokens))
      where = f"of node {node} in {when}"
      total = np.exp(log_probs.astype(float)).sum(-1)
      require(
        np.allclose(total, 1.0, atol=self.tolerance),
        f"the distribution {where} adds up to {total}",
      )
      require(
        np.all(log_probs[rows, tokens] > -np.inf),
        f"a token {where} has no probability where it was drawn from",
      )
      addresses = [np.full(len(draft.tokens), node)]
      if self.spec.siblings == "without_replacement":
        same = draft.parents == draft.parents[:, node, None]
        addresses.append(np.argmax(same, axis=1))  # the first sibling's noise
      matches = []
      for address in addresses:
        score = log_probs + noise[np.arange(ROWS), address][used]
        gap = score.max(-1) - score[rows, tokens]
        matches.append(np.all(gap < self.tolerance))
      require(
        any(matches),
        f"tokens {where} are not the likeliest of log_probs + "
        f"context.noise(depth, {node})",
      )

  def check_past(self, state, draft, noise, in_use, node, when) -> None:
    """What comes before a node decides its distribution and whether it is
    drafted: neither its own noise nor a later node's does."""
    other = noise.copy()
    other[:, node:] = self.rng.gumbel(size=other[:, node:].shape)
    again = self.propose(state, other)
    used = in_use[:, : node + 1]
    used_again = np.arange(node + 1) < again.count[:, None]
    require(
      np.array_equal(used, used_again),
      f"whether node {node} is drafted in {when} depends on its token or on a "
      "later one; a token that ends a draft must be verified too",
    )
    for name, stop in (("tokens", node), ("parents", node)):
      ours, theirs = (getattr(x, name)[:, :stop] for x in (draft, again))
      require(
        np.array_equal(ours[used[:, :stop]], theirs[used[:, :stop]]),
        f"{name} before node {node} in {when} depend on the noise of later "
        "nodes",
      )
    ours, theirs = (
      np.exp(x.log_probs[:, 1 : node + 1]) for x in (draft, again)
    )
    require(
      np.allclose(ours[used[:, 1:]], theirs[used[:, 1:]], atol=self.tolerance),
      f"the distribution of node {node} in {when} depends on its own noise or "
      "on a later node's",
    )

  def check_state(self) -> None:
    """After rounds it drafts as after a prefill of the committed text."""
    rule = acceptance.rejection()
    token = int(np.bincount(np.asarray(self.baseline.tokens).ravel()).argmax())
    for when, rounds, eos in (
      ("a round", 1, _NEVER),
      ("five rounds", 5, _NEVER),
      ("a text that was cut at an EOS", decode.MAX_ROUNDS, token),
    ):
      state = self.run(rule, rounds=rounds, eos=eos)
      fresh = self.start(prompt=state.tokens, prompt_length=state.length)
      noise = self.noise()
      ours, theirs = (self.propose(x, noise) for x in (state, fresh))
      self.same_draft(ours, theirs, when)

  def same_draft(self, ours, theirs, when) -> None:
    """Node by node, as long as earlier nodes hold the same tokens."""
    count = np.minimum(ours.count, theirs.count)
    for row in range(ROWS):
      for node in range(1, count[row]):
        if ours.log_probs is not None:
          pair = [np.exp(x.log_probs[row, node]) for x in (ours, theirs)]
          require(
            np.allclose(*pair, atol=self.tolerance),
            f"after {when}, node {node} of row {row} is drawn from {pair[0]}; "
            f"after a prefill of the same text from {pair[1]}",
          )
        same = all(
          getattr(ours, name)[row, node] == getattr(theirs, name)[row, node]
          for name in ("tokens", "parents")
        )
        if ours.log_probs is None:
          require(
            same,
            f"after {when}, node {node} of row {row} is another token than "
            "after a prefill of the same text",
          )
        if not same:
          break

  # Distributions.

  def settings(self) -> dict:
    """One setting for all rows: few tokens are possible."""
    vocab_size = self.target.vocab_size
    return {
      "temperature": np.full(ROWS, 1.0),
      "top_k": np.full(ROWS, vocab_size if vocab_size <= _TINY else 3),
      "top_p": np.full(ROWS, 1.0),
    }

  def after(self, texts: Sequence[tuple[int, ...]]) -> np.ndarray:
    """[len(texts), V] the target's probabilities of what follows each."""
    probs = []
    for first in range(0, len(texts), ROWS):
      tokens = np.zeros((ROWS, LENGTH + self.spec.max_depth), np.int32)
      length = np.ones(ROWS, np.int32)
      for row, text in enumerate(texts[first : first + ROWS]):
        tokens[row, : len(text)], length[row] = text, len(text)
      log_probs = _log_probs_after(
        self.target,
        self.params.target,
        tokens,
        length,
        sampling.settings(ROWS, **self.settings()),
      )
      probs.append(np.exp(np.asarray(log_probs, float)))
    probs = np.concatenate(probs)[: len(texts)]
    return probs / probs.sum(-1, keepdims=True)

  def tables(self, text: tuple[int, ...], depth: int) -> list[np.ndarray]:
    """Distributions as of testing.enumeration of `depth` tokens after text."""
    vocab_size = self.target.vocab_size
    return [
      self.after(
        [text + more for more in itertools.product(range(vocab_size), repeat=d)]
      ).reshape((vocab_size,) * (d + 1))
      for d in range(depth)
    ]

  def check_distribution(self, rules) -> None:
    """Of one round exactly, if drafts are few; of whole texts by chi-square."""
    size, vocab_size = self.spec.max_nodes, self.target.vocab_size
    sampled = self.spec.siblings != "deterministic"
    drafts = vocab_size ** (size - 1 if sampled else 0)
    if vocab_size <= _TINY and drafts <= _MOST_DRAFTS and size > 1:
      lossless = [
        rule
        for rule in (every_rule() if rules is None else rules)
        if rule.lossless and rule.residual and self.fits(rule)
      ]
      lossless = [rule for rule in lossless if rule is not acceptance.greedy()]
      for rounds in (0, 2):
        self.check_one_round(rounds, lossless)
    self.check_texts()

  def check_one_round(self, rounds: int, rules) -> None:
    """All rows hold one text; its drafts are forced, a row each."""
    state = self.run(
      acceptance.rejection(),
      rounds=rounds,
      prompt=self.prompt[:1].repeat(ROWS, 0),
      prompt_length=np.full(ROWS, 5),
      index=np.zeros(ROWS),
      **self.settings(),
    )
    drafts, count = self.every_draft(state)
    total = drafts.weight.sum()
    require(
      abs(total - 1) < self.tolerance,
      f"the probabilities of all its drafts add up to {total:.6f}: they are "
      "not what its tokens are drawn from",
    )
    tables = self.tables(_texts(state)[0], self.spec.max_depth + 1)
    exact = enumeration.text_distribution(tables)
    for rule in rules:
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
    wanted = [(0,) * (size - 1)]
    if self.spec.siblings != "deterministic":
      wanted = itertools.product(range(vocab_size), repeat=size - 1)
    wanted = np.array(list(wanted), np.int32)
    seen: dict = {}
    for first in range(0, len(wanted), ROWS):
      tokens = np.zeros((ROWS, size), np.int32)
      part = wanted[first : first + ROWS]
      tokens[: len(part), 1:] = part
      draft = self.propose(state, self.forcing(tokens))
      for row in range(len(part)):
        count = int(draft.count[row])
        used = slice(1, count)
        text = tuple(draft.tokens[row, used].tolist())
        if not np.array_equal(text, tokens[row, used]) and (
          self.spec.siblings != "deterministic"
        ):
          continue  # it cannot be drawn
        weight, drawn = 1.0, None
        if draft.log_probs is not None:
          drawn = np.exp(draft.log_probs[row].astype(float))
          weight = np.prod(drawn[np.arange(1, count), list(text)])
        tokens_of_row = np.where(np.arange(size) < count, draft.tokens[row], 0)
        tokens_of_row[0] = 0
        entry = (weight, tokens_of_row, draft.parents[row], drawn, count)
        seen.setdefault((count, text), entry)
    weight, tokens, parents, drawn, count = zip(*seen.values())
    drawn = None if drawn[0] is None else np.array(drawn)
    drafts = (np.array(weight), np.array(tokens), np.array(parents), drawn)
    return enumeration.Drafts(*drafts), np.array(count)

  def forcing(self, tokens: np.ndarray) -> np.ndarray:
    """Noise [ROWS, A, V] by which every node has its token of [ROWS, N].

    Siblings without replacement share noise: earlier ones are given more.
    """
    size, vocab_size = self.spec.max_nodes, self.target.vocab_size
    noise = np.zeros((ROWS, 2 * size, vocab_size), np.float32)
    rows = np.arange(ROWS)
    parents = self.spec.parents
    for node in range(1, size):
      siblings = [node]
      if self.spec.siblings == "without_replacement" and parents:
        siblings = [n for n in range(node, size) if parents[n] == parents[node]]
      for rank, sibling in reversed(list(enumerate(siblings))):
        noise[rows, node, tokens[:, sibling]] = 1000.0 * (size - rank)
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
        acceptance.rejection(),
        prompt=self.prompt[:1].repeat(ROWS, 0),
        prompt_length=np.full(ROWS, prompt_length),
        limit=np.full(ROWS, prompt_length + _NEW),
        index=call * ROWS + np.arange(ROWS),
        **self.settings(),
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
    rule = acceptance.rejection()
    lowered = decode.run.lower(
      self.target,
      self.drafter,
      rule,
      self.params,
      state,
      jax.ShapeDtypeStruct((1,), jnp.int32),
      jnp.int32(decode.MAX_ROUNDS),
    )
    own = [x for x in jax.tree.leaves(state.draft_state) if x.ndim == 4]
    buffers = [*jax.tree.leaves(state.target_cache.layers), *own]
    # XLA copies what has one number a position (the table model) as it likes.
    buffers = [buffer for buffer in buffers if buffer.shape[-1] > 1]
    copies = cache_copies(lowered.compile().as_text(), buffers)
    require(not copies, f"{len(copies)} copies, as {copies[:1]}")


# Operations that make a second buffer of what they are given.
_COPYING = ("copy", "copy-start", "transpose", "concatenate", "pad", "reverse")


def cache_copies(text: str, buffers) -> list[str]:
  """Finds instructions in loops that make another buffer of a cache's shape.

  Args:
    text: optimised HLO.
    buffers: what has the caches' shapes; dimensions are compared in any order.
  """
  shapes = {tuple(sorted(buffer.shape)) for buffer in buffers}
  program = hlo.Program(text)
  copies = []
  for instruction, _, times in program.runs(unknown=2.0):
    if times < 2:
      continue
    for one in (instruction, *program.inside(instruction)):
      made = {tuple(sorted(buffer.shape)) for buffer in one.buffers}
      if one.op in _COPYING and made & shapes:
        copies.append(one.line.strip())
  return copies


def every_rule() -> list[AcceptanceRule]:
  """Rules of specdec.acceptance by which greedy rows are greedy text."""
  return [
    acceptance.rejection(),
    acceptance.block(),
    acceptance.kseq(),
    acceptance.naive(),
    acceptance.greedy(),
    acceptance.lenience(0.5),
    acceptance.typical(),
    acceptance.relaxed(2, 0.5),
  ]


def _texts(state) -> list[tuple[int, ...]]:
  """Committed tokens of every row."""
  rows = zip(np.asarray(state.tokens).tolist(), np.asarray(state.length))
  return [tuple(row[:length]) for row, length in rows]


def _cut(text: tuple[int, ...], start: int, eos: int) -> tuple[int, ...]:
  """A text up to its first EOS behind the prompt."""
  new = text[start:]
  return text[:start] + new[: new.index(eos) + 1 if eos in new else None]


def _frozen(state) -> dict[str, np.ndarray]:
  """Copies of what a row of a state is, whatever the drafter keeps."""
  stats = state.stats
  parts = {
    "tokens": state.tokens,
    "length": state.length,
    "done": state.done,
    "fault": state.fault,
    "origin": state.origin,
    "log_probs": state.log_probs,
    "draft_log_probs": state.draft_log_probs,
    "rounds": stats.rounds,
    "drafted": stats.drafted,
    "accepted": stats.accepted,
    "nodes": stats.nodes,
  }
  return {name: np.array(value) for name, value in parts.items()}


def _p_value(seen: np.ndarray, probs: np.ndarray) -> float:
  """Of chi-square; cells that expect fewer than 5 are one cell."""
  expected = probs * seen.sum()
  rare = expected < 5
  seen = np.append(seen[~rare], seen[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  chi = np.sum((seen - expected) ** 2 / np.maximum(expected, 1e-9))
  freedom = max(len(expected) - 1, 1)
  return float(jax.scipy.special.gammaincc(freedom / 2, chi / 2))
